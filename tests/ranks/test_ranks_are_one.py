"""Whatever several ranks are asked, they answer as one does: the same tokens, the same scores."""

from __future__ import annotations

import signal
from contextlib import nullcontext

import numpy as np
import pytest
import spelling
from drafts import ScriptedDrafter, always_draft, speculate
from effort import effort
from patience import PATIENCE_S
from tiny_llm import VOCAB, ids
from tiny_ranks import open_ranks, ranks_in_threads, write_weights

from quire import BeamSearchParams, SamplingParams
from quire.engine.draws.speculation import NO_SPECULATION
from quire.engine.grammar.compiler import GrammarCompiler
from quire.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [ids(length, salt=length) for length in (5, 37, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(folder):
    with open_ranks(folder, 1, num_blocks=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def several(folder):
    with open_ranks(folder, 2, num_blocks=128) as llm:
        yield llm
        assert llm.stats()["blocks"]["in_use"] == 0


@pytest.fixture(params=["in turn", "overlapped"])
def both(request, one, several):
    for llm in (one, several):
        llm.reset_prefix_cache()
        llm.engine.overlap = request.param == "overlapped"
    return one, several


def few_processes():
    """Where ranks need not be processes of their own, they are only at full size."""
    return effort(ranks_in_threads(), nullcontext())


def answers(llm, params=GREEDY, prompts=PROMPTS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_cold_and_warm(both):
    one, several = both
    cold = answers(one)
    assert answers(several) == cold
    assert answers(several) == cold
    last = several.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]
    assert last.num_cached_tokens == len(PROMPTS[2]) - 1


def test_samples_that_fork_with_seeds_penalties_and_biases(both):
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    biased = SamplingParams(temperature=0.8, seed=6, max_tokens=12, logit_bias={3: 5.0}, top_p=0.9)
    for each in (params, biased):
        assert answers(both[1], each) == answers(both[0], each)
    assert both[1].stats()["forks"]["count"] > 0


def test_beams(both):
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    one, several = (llm.beam_search(PROMPTS, params, use_tqdm=False) for llm in both)
    for ours, theirs in zip(several, one, strict=True):
        assert [b.token_ids for b in ours.outputs] == [b.token_ids for b in theirs.outputs]
        scores = [[beam.cumulative_logprob for beam in each.outputs] for each in (ours, theirs)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    assert both[1].stats()["forks"]["copied_blocks"] > 0


def test_logprobs_of_prompts_and_answers(both):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    one, several = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in both)
    for ours, theirs in zip(several, one, strict=True):
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        for mine, his in pairs:
            assert mine.keys() == his.keys()
            got, wanted = ([each[token].logprob for token in his] for each in (mine, his))
            np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_drafts(both):
    one, several = both
    plain = answers(one)
    behind = {tuple(p): [*p, *a[0]] for p, a in zip(PROMPTS, plain, strict=True)}

    def next_tokens(name, token_ids, most):
        whole = next(w for p, w in behind.items() if list(token_ids[: len(p)]) == list(p))
        return whole[len(token_ids) : len(token_ids) + most]

    drafter = ScriptedDrafter(next_tokens, lambda name, place: place % 3 == 0, vocab=VOCAB)
    speculation = speculate(several.engine, drafter, 4)
    try:
        assert answers(several) == plain
        assert sum(speculation.accepted_at) > 0
    finally:
        several.engine.scheduler.speculation = NO_SPECULATION


@pytest.mark.parametrize("drafter", ["ngram", "the model itself"])
def test_drafters_of_its_own(folder, one, drafter):
    """Rank 0 guesses, and all ranks compute the guesses."""
    name = drafter if drafter == "ngram" else str(folder)
    prompts = [ids(12, salt=3) * 3, ids(30, salt=4)]
    with few_processes(), open_ranks(folder, 2, num_blocks=128, speculative=name) as llm:
        always_draft(llm.engine)
        assert answers(llm, prompts=prompts) == answers(one, prompts=prompts)
        assert llm.stats()["speculation"]["drafted"] > 0
        if drafter != "ngram":
            assert llm.stats()["speculation"]["accepted"] > 0


def test_a_grammar(both):
    for llm in both:
        llm.engine.grammars = GrammarCompiler(spelling.tokenizer(), VOCAB, (0,))
    choice = SamplingParams(temperature=0, max_tokens=8, structured={"regex": "[abc]{3}12"})
    one, several = (answers(llm, [choice, GREEDY, choice]) for llm in both)
    assert several == one


def test_an_abort_leaves_the_others_alone(both):
    one, several = both
    alone = answers(one, prompts=PROMPTS[:1])
    stream = several.stream(PROMPTS[2], SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    stream.close()
    assert answers(several, prompts=PROMPTS[:1]) == alone
    assert several.stats()["blocks"]["in_use"] == 0


def test_an_interrupt_waits_for_the_end_of_a_launch(several, monkeypatch):
    """Rank 0 may not leave the others in the middle of a step; after it, all can go on."""
    wanted = answers(several)
    forward = several.engine.runner.model.forward

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return forward(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(several.engine.runner.model, "forward", interrupted)
        answers(several)
    assert answers(several) == wanted


def test_four_ranks_with_two_kv_heads(folder, one):
    one.reset_prefix_cache()
    with few_processes(), open_ranks(folder, 4, num_blocks=128) as llm:
        assert answers(llm) == answers(one)


@pytest.mark.parametrize(("size", "what"), [(3, "8 attention heads"), (8, "100 MLP features")])
def test_ranks_that_the_model_has_no_parts_for(size, what, tmp_path):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} does not divide .* {what}"):
        open_ranks(write_weights(tmp_path, intermediate_size=100), size)


def test_preempted_in_chunks_from_host_memory_and_from_the_disk_after_a_restart(
    folder, one, tmp_path
):
    one.reset_prefix_cache()
    prompts = [ids(20 + 7 * i, salt=i) for i in range(6)]
    long = SamplingParams(temperature=0, max_tokens=effort(30, 60), ignore_eos=True)
    crowd, wanted = answers(one, long, prompts), answers(one)
    disk = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB", "num_blocks": 20}
    small = {"max_num_batched_tokens": 24, "max_model_len": 128, "host_cache_bytes": "16MiB"}
    with open_ranks(folder, 2, **disk, **small) as llm:
        assert answers(llm, long, prompts) == crowd
        assert llm.stats()["preemptions"] > 0
        assert answers(llm) == wanted
        assert from_tier(llm, "host", wanted)
    with open_ranks(folder, 2, **disk) as llm:
        assert from_tier(llm, "ssd", wanted)
        assert llm.stats()["tiers"]["ssd"]["drops"] == {}


def from_tier(llm, tier, wanted):
    """Whether the answers are as wanted, and what the prompts' blocks held came from the tier."""
    assert llm.engine.scheduler.tiering.store.flush(PATIENCE_S)
    llm.reset_prefix_cache(device_only=True)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    found = [output.cached_tokens_by_tier.get(tier, 0) for output in outputs]
    same = [[output.outputs[0].token_ids] for output in outputs] == wanted
    return same and found == [len(prompt) // 8 * 8 for prompt in PROMPTS]
