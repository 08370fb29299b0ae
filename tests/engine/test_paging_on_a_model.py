"""Real attention over real pages: a tiny model gives the same answers whatever happens to it."""

from __future__ import annotations

import re

import pytest
import spelling
import torch
from effort import effort
from tiny_llm import VOCAB, ids, open_tiny, write_config

from quire import SamplingParams
from quire.engine.grammar.compiler import GrammarCompiler

BLOCK = 8
NEARLY_ALL = list(range(150))
FULL = {}
WINDOWED = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 10,
    "max_window_layers": 1,  # those behind it have windows
}
DEVICES = ["cpu", "cpu-overlapped", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def tiny(request, tmp_path):
    """Opens the tiny model with the settings it is given; closes it at the end."""
    opened = []

    def open_llm(config=FULL, **settings):
        write_config(tmp_path, **config)
        shape = {"block_size": BLOCK, "num_blocks": 128}
        llm = open_tiny(tmp_path, request.param, **shape | settings)
        opened.append(llm)
        return llm

    yield open_llm
    for llm in opened:
        assert llm.stats()["blocks"]["in_use"] == 0
        llm.close()


def greedy(max_tokens, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def poison_free_blocks(llm):
    """NaN into every free block after every step: a kernel that reads one shows it."""
    engine = llm.engine
    step = engine.step

    def poisoned():
        outputs = step()
        free = list(engine.scheduler.cache.allocator._free)
        engine.runner.cache.tensor[free] = torch.nan
        return outputs

    engine.step = poisoned


@pytest.mark.parametrize("caching", [True, False])
def test_freed_blocks_are_never_read(tiny, caching):
    prompts = [[*ids(40, i % 3), i] for i in range(effort(6, 9))] + [ids(40), ids(40)]
    params = greedy(effort(12, 20))
    alone = tiny(enable_prefix_caching=False)
    expected = [tokens(alone.generate([p], params, use_tqdm=False))[0] for p in prompts]
    crowded = tiny(num_blocks=22, enable_prefix_caching=caching, max_num_batched_tokens=50)
    poison_free_blocks(crowded)
    for _ in range(2):
        assert tokens(crowded.generate(prompts, params, use_tqdm=False)) == expected
    assert crowded.stats()["preemptions"] > 0 or not caching


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK])
def test_block_edges(tiny, length):
    params = greedy(6, logprobs=3)
    prompt = ids(length)
    plain = tiny(enable_prefix_caching=False).generate([prompt], params, use_tqdm=False)[0]
    llm = tiny()
    for cached in (BLOCK - 1, BLOCK, 2 * BLOCK, length):
        llm.reset_prefix_cache()
        llm.generate([prompt[:cached]], greedy(1), use_tqdm=False)
        warm = llm.generate([prompt], params, use_tqdm=False)[0]
        assert warm.num_cached_tokens == min(min(cached, length) // BLOCK * BLOCK, length - 1)
        same_logprobs(warm, plain)


def same_logprobs(one, other):
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.token_ids == b.token_ids
        for mine, theirs in zip(a.logprobs, b.logprobs, strict=True):
            for token_id in mine.keys() & theirs.keys():
                assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (FULL, {"temperature": 0}),
        (FULL, {"temperature": 1.0, "n": 3, "seed": 11}),
        (WINDOWED, {"temperature": 1.0, "n": 2, "seed": 11}),
    ],
    ids=["greedy", "samples", "windows"],
)
def test_preempted_at_every_token(tiny, config, params):
    params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2, **params)
    prompt = ids(21)
    llm = tiny(config)
    assert (10 in llm.engine.runner.cache.layout.windows) == (config is WINDOWED)
    plain = llm.generate([prompt], params, use_tqdm=False)[0]
    engine = llm.engine
    step = engine.step
    for at in range(0, 14, effort(3, 1)):
        calls = []

        def disturbed(at=at, calls=calls):
            calls.append(1)
            if len(calls) > at and len(calls) % 2 and engine.scheduler.running:
                engine.scheduler.queues.preempt(engine.scheduler.running[-1])
            return step()

        engine.step = disturbed
        again = llm.generate([prompt], params, use_tqdm=False)[0]
        same_logprobs(again, plain)
    engine.step = step


def test_samples_share_the_prompt_and_equal_those_made_apart(tiny):
    """A fork that wrote into its sibling's block would change the sibling's next tokens."""
    llm = tiny()
    params = SamplingParams(temperature=1.0, n=5, seed=3, max_tokens=24, ignore_eos=True)
    together = llm.generate([ids(19)], params, use_tqdm=False)[0]
    apart = tiny(max_num_seqs=1)  # one at a time: nothing is ever shared while it is written
    assert tokens(apart.generate([ids(19)], params, use_tqdm=False)) == tokens([together])
    assert len({tuple(sample.token_ids) for sample in together.outputs}) == 5


@pytest.mark.diagonal
@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache-aware"])
@pytest.mark.parametrize("budget", [1, 13, 400])
def test_every_policy_and_budget_gives_the_same(tiny, policy, budget):
    prompts = [ids(5 + 9 * i, i % 2) for i in range(6)]
    expected = tokens(tiny().generate(prompts, greedy(10), use_tqdm=False))
    llm = tiny(scheduling_policy=policy, max_num_batched_tokens=budget)
    order = [3, 1, 2, 0, 5, 4] if policy == "priority" else None
    assert tokens(llm.generate(prompts, greedy(10), use_tqdm=False, priority=order)) == expected


def test_overlapped_steps_change_nothing(tiny):
    """Every kind of request at once: one step after another, then each launched behind the last."""
    asked = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=30, repetition_penalty=1.5),
        SamplingParams(temperature=0.9, seed=2, max_tokens=25, presence_penalty=1.0),
        SamplingParams(temperature=0, max_tokens=30, frequency_penalty=1.3, logprobs=3),
        SamplingParams(temperature=1.2, seed=3, max_tokens=20, n=3, top_p=0.9),
        SamplingParams(temperature=1, seed=4, max_tokens=40, stop_token_ids=list(range(40))),
        SamplingParams(
            temperature=1, seed=5, max_tokens=9, min_tokens=6, stop_token_ids=NEARLY_ALL
        ),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1),
        SamplingParams(temperature=0.7, seed=6, max_tokens=1),
        SamplingParams(temperature=0.7, seed=7, max_tokens=15, best_of=3, n=2, top_k=20),
    ]
    found = []
    for overlap in (False, True):
        llm = tiny(max_num_batched_tokens=24, num_blocks=40, max_model_len=100)
        llm.engine.overlap = overlap
        prompts = [ids(3 + 5 * i, i) for i in range(len(asked))]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        found.append(outputs)
    for in_turn, overlapped in zip(*found, strict=True):
        assert tokens([in_turn]) == tokens([overlapped])
        reasons = [[s.finish_reason for s in each.outputs] for each in (in_turn, overlapped)]
        assert reasons[0] == reasons[1]
        for one, other in zip(judged(in_turn), judged(overlapped), strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def judged(output):
    """Every logprob of an answer and its prompt, by token."""
    entries = [entry for sample in output.outputs for entry in sample.logprobs or []]
    entries += [entry for entry in output.prompt_logprobs or [] if entry is not None]
    return [{token: found.logprob for token, found in entry.items()} for entry in entries]


def test_forms_are_kept_in_a_crowd(tiny):
    """Drawn greedily and at random, with penalties, and with neighbours that have no form."""
    forms = [{"regex": "[a-f]{3,30}"}, None, {"choice": ["abcd", "q0"]}, {"regex": "([0-9],)*x"}]
    wishes = [{}, {"temperature": 0.9}, {"repetition_penalty": 1.2}, {"n": 2, "temperature": 1.0}]
    params = [
        SamplingParams(
            **{"temperature": 0, "seed": 3, "max_tokens": 24, "structured": form, **wish},
            ignore_eos=form is None,
        )
        for form in forms
        for wish in wishes
    ]
    prompts = [ids(20 + i, i % 3) for i in range(len(params))]

    def answers(one_by_one=False, **settings):
        llm = tiny(**settings)
        llm.engine.grammars = GrammarCompiler(spelling.tokenizer(), VOCAB, (spelling.EOS,))
        pairs = [([p], [q]) for p, q in zip(prompts, params, strict=True)]
        calls = pairs if one_by_one else [(prompts, params)]
        outputs = [o for p, q in calls for o in llm.generate(p, q, use_tqdm=False)]
        return llm, outputs

    _, alone = answers(one_by_one=True)
    crowded, together = answers(num_blocks=26, max_num_batched_tokens=50)
    assert tokens(together) == tokens(alone)
    assert crowded.stats()["preemptions"] > 0
    for output, asked in zip(together, params, strict=True):
        for sample in output.outputs:
            if asked.structured is not None and sample.finish_reason == "stop":
                text = "".join(spelling.TOKENS[i] for i in sample.token_ids if i)
                pattern = asked.structured.regex or "|".join(asked.structured.choice)
                assert re.fullmatch(pattern, text)
