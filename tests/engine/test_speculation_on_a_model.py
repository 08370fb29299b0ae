"""Real attention over drafts that are right and wrong: the answers are those without any."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import spelling
from drafts import ScriptedDrafter, always_draft, speculate
from effort import effort
from patience import PATIENCE_S
from tiny_llm import VOCAB, ids, open_tiny, write_config

from quire import SamplingParams
from quire.engine.draws.speculation import NO_SPECULATION
from quire.engine.grammar.compiler import GrammarCompiler
from quire.errors import ConfigError
from quire.runner.sampling.penalties import adjust_
from quire.runner.sampling.sampler import SampleRow, filtered_weights_

BLOCK = 8
DEVICES = ["cpu-overlapped", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "temperature": {"seed": 3},
    "top-k": {"seed": 4, "top_k": 5, "temperature": 0.8},
    "top-p": {"seed": 5, "top_p": 0.7},
    "min-p": {"seed": 6, "min_p": 0.05, "temperature": 1.3},
    "penalties": {
        "seed": 7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"seed": 8, "logit_bias": {3: 4.0, 9: -100.0}},
    "several": {"seed": 9, "n": 3, "temperature": 0.7},
    "best of": {"seed": 10, "n": 1, "best_of": 3},
    "a stop": {"temperature": 0, "stop_token_ids": list(range(0, VOCAB, 9)), "min_tokens": 6},
}


@pytest.fixture(params=DEVICES)
def tiny(request, tmp_path):
    """Opens the tiny model with the settings it is given; closes it at the end."""
    write_config(tmp_path)
    small = write_config(tmp_path / "small", num_hidden_layers=1)
    opened = []

    def open_llm(**settings):
        shape = {"block_size": BLOCK, "num_blocks": 128}
        llm = open_tiny(tmp_path, request.param, **shape | settings)
        opened.append(llm)
        return llm

    open_llm.small = str(small)
    yield open_llm
    for llm in opened:
        assert llm.stats()["blocks"]["in_use"] == 0
        if (speculation := llm.engine.scheduler.speculation) is not NO_SPECULATION:
            assert not speculation._drafting
        llm.close()


def params_of(way, max_tokens=24):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **WAYS[way])


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(sample.token_ids, sample.finish_reason, *logprobs(sample)) for sample in output.outputs]
        for output in outputs
    ]


def logprobs(sample):
    """Of the drawn tokens: of those just left out, rounding may choose others."""
    each = sample.logprobs or []
    values = [token[i].logprob for i, token in zip(sample.token_ids, each, strict=False)]
    return [Near(values)] if each else []


class Near(list):
    """Numbers that are equal to others if they are nearly so."""

    def __eq__(self, other):
        return np.allclose(self, other, rtol=0, atol=1e-3)

    __hash__ = None


def replay(prompts, right, spoil):
    """A drafter that has read the answers: of each prompt its first sample's."""
    script = {tuple(p): [*p, *a[0][0]] for p, a in zip(prompts, right, strict=True)}

    def next_tokens(sequence, token_ids, most):
        known = script[tuple(sequence.request.prompt_ids.tolist())]
        return known[len(token_ids) : len(token_ids) + most]

    return ScriptedDrafter(next_tokens, lambda sequence, place: place % spoil == 0, VOCAB)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_answers_with_drafts(tiny, way):
    prompts = [ids(20 + 3 * i, i) for i in range(effort(3, 5))]
    params = params_of(way)
    right = answers(tiny(), prompts, params)
    llm = tiny()
    speculation = speculate(llm.engine, replay(prompts, right, spoil=4), 5)
    assert answers(llm, prompts, params) == right
    assert speculation.total.accepted > 0 or "several" in way or "best" in way
    assert answers(llm, prompts, params) == right  # from a warm cache


@pytest.mark.diagonal
@pytest.mark.parametrize("settings", [{"num_blocks": 16}, {"max_num_batched_tokens": 9}])
@pytest.mark.parametrize("way", ["logprobs", "several", "a stop"])
def test_preempted_and_in_chunks(tiny, settings, way):
    prompts = [ids(30, i) for i in range(6)]
    params = params_of(way)
    right = answers(tiny(enable_prefix_caching=False), prompts, params)
    llm = tiny(**settings)
    speculate(llm.engine, replay(prompts, right, spoil=3), 4)
    assert answers(llm, prompts, params) == right
    assert llm.stats()["preemptions"] > 0 or "num_blocks" not in settings


def test_from_a_lower_tier(tiny):
    """What accepted drafts have filled is stored and restored like anything else."""
    prompts = [ids(30, i) for i in range(4)]
    params = params_of("greedy", 40)
    right = answers(tiny(), prompts, params)
    llm = tiny(host_cache_bytes="64MB")
    speculate(llm.engine, replay(prompts, right, spoil=7), 16)
    assert answers(llm, prompts, params) == right
    longer = [[*p, *a[0][0]] for p, a in zip(prompts, right, strict=True)]
    assert llm.engine.scheduler.tiering.store.flush(PATIENCE_S)
    llm.reset_prefix_cache(device_only=True)
    outputs = llm.generate(longer, params_of("greedy", 4), use_tqdm=False)
    assert [o.cached_tokens_by_tier.get("host", 0) for o in outputs] == [64] * 4  # of 70 tokens
    plain = tiny().generate(longer, params_of("greedy", 4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


def test_beside_requests_without_drafts(tiny):
    prompts = [ids(20, i) for i in range(6)]
    right = answers(tiny(), prompts, params_of("greedy"))
    llm = tiny()
    drafter = replay(prompts, right, spoil=5)
    everything = drafter.next_tokens
    drafter.next_tokens = lambda s, t, most: everything(s, t, most if s.request.number % 2 else 0)
    speculate(llm.engine, drafter, 4)
    assert answers(llm, prompts, params_of("greedy")) == right


def test_by_a_smaller_model(tiny):
    """Random weights foretell little; what matters is that nothing else changes."""
    prompts = [ids(20 + i, i) for i in range(5)]
    for way in ("greedy", "temperature", "several"):
        right = answers(tiny(), prompts, params_of(way))
        llm = tiny(speculative=tiny.small, num_speculative_tokens=3)
        always_draft(llm.engine)
        assert answers(llm, prompts, params_of(way)) == right
        assert llm.stats()["speculation"]["drafted"] > 0


def test_by_the_model_itself_every_draft_is_right(tiny):
    """So its pages are in step with the sequence: over many rounds, chunks and rejected ends."""
    prompts = [ids(40 + i, i) for i in range(4)]
    llm = tiny(num_speculative_tokens=4, speculative=tiny.small.removesuffix("/small"))
    always_draft(llm.engine)
    right = answers(tiny(), prompts, params_of("greedy", 60))
    assert answers(llm, prompts, params_of("greedy", 60)) == right
    fared = llm.stats()["speculation"]
    assert fared["accepted"] >= 0.97 * fared["drafted"] > 0
    assert fared["accepted_by_position"][3] > 0


def test_by_n_grams(tiny):
    prompts = [ids(12, i) * 5 for i in range(4)]
    for way in ("greedy", "penalties"):
        right = answers(tiny(), prompts, params_of(way, 60))
        llm = tiny(speculative="ngram")
        assert answers(llm, prompts, params_of(way, 60)) == right


def test_a_drafter_that_fails_ends_drafting_and_nothing_else(tiny):
    prompts = [ids(20, i) for i in range(3)]
    right = answers(tiny(), prompts, params_of("greedy"))
    llm = tiny()
    drafter = replay(prompts, right, spoil=5)

    def fail(*_):
        raise RuntimeError("on purpose")

    drafter.next_tokens = fail
    speculation = speculate(llm.engine, drafter, 4)
    assert answers(llm, prompts, params_of("greedy")) == right
    assert speculation.is_off and speculation.total.drafted == 0


@pytest.mark.parametrize("spoil", [1, 3])
def test_under_a_grammar(tiny, spoil):
    """Drafts that the grammar does not allow are never computed; those it allows are judged."""
    llm, plain = tiny(), tiny()
    for each in (llm, plain):
        each.engine.grammars = GrammarCompiler(spelling.tokenizer(), VOCAB, (spelling.EOS,))
    form = {"regex": "[a-f]{10}(x|y){4,12}"}
    params = SamplingParams(temperature=0, max_tokens=30, structured=form)
    prompts = [ids(20, i) for i in range(8)]
    right = answers(plain, prompts, params)
    speculate(llm.engine, replay(prompts, right, spoil), 5)
    assert answers(llm, prompts, params) == right


def test_a_draft_model_with_another_vocabulary_is_refused(tiny, tmp_path):
    other = write_config(tmp_path / "other", vocab_size=200)
    with pytest.raises(ConfigError, match="vocabulary of 200 tokens and the model one of 199"):
        tiny(speculative=str(other))
    with pytest.raises(ConfigError, match="needs a drafter"):
        tiny(num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="ngarm is neither ngram nor mtp: There is no model"):
        tiny(speculative="ngarm")


def test_outputs_tell_how_drafts_fared(tiny):
    prompts = [ids(20)]
    right = answers(tiny(), prompts, params_of("greedy"))
    llm = tiny()
    speculate(llm.engine, replay(prompts, right, spoil=5), 3)
    [output] = llm.generate(prompts, params_of("greedy"), use_tqdm=False)
    fared, total = output.speculation, llm.stats()["speculation"]
    assert fared["drafted"] == total["drafted"] > fared["accepted"] == total["accepted"] > 0
    assert sum(total["accepted_by_position"]) == total["accepted"]
    assert np.all(np.diff(total["drafted_by_position"]) <= 0)
    assert tiny().generate(prompts, params_of("greedy"), use_tqdm=False)[0].speculation is None


DRAWN = {
    "temperature": {"temperature": 0.2},
    "top-k": {"temperature": 0.4, "top_k": 6},
    "top-p": {"temperature": 0.3, "top_p": 0.8},
    "min-p": {"temperature": 0.4, "min_p": 0.1},
    "penalties": {"temperature": 0.2, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


@pytest.mark.parametrize("way", DRAWN)
def test_drafts_leave_the_distribution_as_it_is(tiny, way):
    """The third token of many requests, behind the likeliest two, by chi-squared.

    The second is computed before the first is known, where steps overlap: it has no drafts.
    """
    prompt, requests = ids(20, 6), effort(600, 1500)
    llm, more = tiny(num_blocks=2000), DRAWN[way]
    likely = int(chances(llm, prompt, [], SamplingParams(**more)).argmax())
    guesses = ScriptedDrafter(lambda s, known, most: [likely] * most, vocab=VOCAB)
    speculation = speculate(llm.engine, guesses, 2)
    params = [
        SamplingParams(max_tokens=5, seed=i, ignore_eos=True, **more) for i in range(requests)
    ]
    outputs = llm.generate([prompt] * requests, params, use_tqdm=False)
    drawn = [o.outputs[0].token_ids for o in outputs]
    [(first, _)] = Counter(tuple(d[:2]) for d in drawn).most_common(1)
    third = np.bincount([d[2] for d in drawn if tuple(d[:2]) == first], minlength=VOCAB)
    expected = chances(llm, prompt, [*first], SamplingParams(**more)) * third.sum()
    assert third[expected == 0].sum() == 0
    assert 0 < speculation.total.accepted < speculation.total.drafted
    assert third.sum() > requests / 15 and is_unsurprising(third, expected)


def chances(llm, prompt, output, params):
    """What a token is drawn from, by the sampler's own steps over the logits of a plain request."""
    model, kept = llm.engine.runner.model, []
    logits_of = model.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "logits", lambda hidden: kept.append(logits_of(hidden)) or kept[-1])
        prompts, one = [[*prompt, *output]], SamplingParams(temperature=0, max_tokens=1)
        llm.reset_prefix_cache()  # a last token alone would be a graph's, whose logits are its own
        llm.generate(prompts, one, use_tqdm=False)
    logits = kept[-1].float().cpu().clone()
    row = SampleRow(params, seed=0, position=len(output))
    row.prompt_ids = np.array(prompt, dtype=np.int32)
    row.output_ids = np.array(output, dtype=np.int32)
    adjust_(logits, [row])
    weights = filtered_weights_(logits, logits.max(-1, keepdim=True).values, [params])[0]
    return (weights / weights.sum()).numpy()


def is_unsurprising(counts, expected):
    """Wilson and Hilferty: the cube root of chi-squared is close to normal; four sigma allowed."""
    likely = expected > 5
    counts = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    assert freedom > 1, "of a prompt that leaves so little choice nothing is shown"
    spread = 2 / (9 * freedom)
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4
