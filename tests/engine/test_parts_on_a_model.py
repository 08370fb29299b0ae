"""Real attention behind a copied part of a block gives the answer that a cold engine gives."""

from __future__ import annotations

import pytest
from effort import effort
from tiny_llm import VOCAB, ids, open_tiny, write_config

from quire import SamplingParams

PARTS = {8: [1, 3, 7], 16: [1, 8, 15], 128: [7, 8, 64, 127]}
NEW_TOKENS = effort(6, 10)
DEVICES = ["cpu", "cpu-overlapped", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def tiny(request, tmp_path):
    """Opens the tiny model with the settings it is given; closes it at the end."""
    write_config(tmp_path)
    opened = []

    def open_llm(block_size, **settings):
        shape = {"block_size": block_size, "num_blocks": 1024 // block_size + 2}
        llm = open_tiny(tmp_path, request.param, **shape | settings)
        opened.append(llm)
        return llm

    yield open_llm
    for llm in opened:
        assert llm.stats()["blocks"]["in_use"] == 0
        llm.close()


def greedy(**more):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **more}
    )


def generate(llm, prompts, params):
    """Each alone, one after the other."""
    return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def sharing(block_size, whole):
    """A prompt, others that share part of the block behind its `whole` first ones, how much."""
    first = ids((whole + 1) * block_size + 3)
    shared = [whole * block_size + part for part in PARTS[block_size]]
    others = [[*first[:count], (first[count] + 1) % VOCAB, *ids(9, count)] for count in shared]
    return first, others, shared


def preempt_now_and_then(llm):
    engine = llm.engine
    step, calls = engine.step, []

    def disturbed():
        calls.append(1)
        if len(calls) % 3 == 0 and engine.scheduler.running:
            engine.scheduler.queues.preempt(engine.scheduler.running[-1])
        return step()

    engine.step = disturbed


@pytest.mark.diagonal
@pytest.mark.parametrize("block_size", PARTS)
@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("params", [greedy(), greedy(temperature=1.0, seed=5, n=3)])
@pytest.mark.parametrize("way", ["at once", "chunked", "preempted"])
def test_the_answers_of_a_cold_engine(tiny, block_size, whole, params, way):
    first, others, shared = sharing(block_size, whole)
    cold = tiny(block_size, enable_prefix_caching=False)
    expected = tokens(generate(cold, others, params))
    warm = tiny(block_size, max_num_batched_tokens=7 if way == "chunked" else 512)
    generate(warm, [first], greedy())
    if way == "preempted":
        preempt_now_and_then(warm)
    found = generate(warm, others, params)
    assert tokens(found) == expected
    least = block_size // 16  # fewer tokens are computed: a copy would move the whole block
    worth = [n if n % block_size >= least else whole * block_size for n in shared]
    assert [output.num_cached_tokens for output in found] == worth


@pytest.mark.parametrize("block_size", PARTS)
def test_all_together_in_a_small_pool(tiny, block_size):
    first, others, _ = sharing(block_size, 1)
    prompts = [first, *others, first, *[[*other, 5, 6] for other in others]]
    cold = tiny(block_size, enable_prefix_caching=False)
    expected = tokens(generate(cold, prompts, greedy()))
    longest = -(-(len(first) + NEW_TOKENS) // block_size)
    warm = tiny(block_size, num_blocks=longest + 3, max_num_batched_tokens=40)
    for _ in range(effort(2, 3)):
        assert tokens(warm.generate(prompts, greedy(), use_tqdm=False)) == expected
    assert warm.stats()["prefix"]["hits"] % block_size


def test_logprobs_of_the_prompt_are_computed_where_a_part_is_cached(tiny):
    first, others, _ = sharing(16, 1)
    params = greedy(prompt_logprobs=1)
    [cold] = generate(tiny(16, enable_prefix_caching=False), others[-1:], params)
    warm = tiny(16)
    generate(warm, [first], greedy())
    [found] = generate(warm, others[-1:], params)
    assert found.num_cached_tokens == 0 and len(found.prompt_logprobs) == len(others[-1])
    for mine, theirs in zip(found.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
        assert {t: e.logprob for t, e in mine.items()} == pytest.approx(
            {t: e.logprob for t, e in theirs.items()}, abs=1e-4
        )
