"""Every family through the engine: whatever happens, texts go on as `transformers` continues them.

All prompts are several windows long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from continued import BEAMS, GREEDY, NEW_TOKENS, SHARED, Continued
from disturbed import before_each_step, poison_free_blocks, preempt
from drafts import ScriptedDrafter, one_in_four, speculate
from effort import effort
from families import GROUPS, MIXTURES, SHAPE, Oracle
from tiny_ranks import ranks_in_threads
from transformers_beams import check_beams

from quire import LLM, SamplingParams

BLOCK = 4
every_family = pytest.mark.parametrize("case", GROUPS)
WINDOWED = [case for case, windows in GROUPS.items() if any(windows)]
# What happens between steps happens to groups of blocks: a short run takes one family for each way
# to divide layers into them, one with sinks, and one with latents. All are read cold and warm.
ONES = ["gemma3", "mistral-window", "smollm3-window", "gpt-oss"]
forked = pytest.mark.parametrize("case", effort([*ONES, "deepseek-v3"], [*GROUPS]))
some_families = pytest.mark.parametrize("case", effort([*ONES, "olmo2", "deepseek-v3"], [*GROUPS]))
Oracles = Callable[[str], Continued]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    def continued(case: str) -> Continued:
        folder = tmp_path_factory.mktemp(case)
        return Continued(Oracle(case, folder, tie_word_embeddings=False))  # else some repeat one

    return cache(continued)


def open_llm(oracle: Continued, overlap: bool = True, **settings: Any) -> LLM:
    """Steps overlap as on a GPU, where the next is planned before the last has ended."""
    basics = {"dtype": "float32", "device": "cpu", "block_size": BLOCK, "num_blocks": 300}
    llm = LLM(str(oracle.folder), use_tqdm=False, **basics | settings)
    llm.engine.overlap = overlap
    return llm


@every_family
def test_cold_and_warm(case: str, oracles: Oracles) -> None:
    """One of the prefixes that are found ends inside the first window, the others beyond it."""
    oracle = oracles(case)
    with open_llm(oracle, overlap=False) as llm:
        assert llm.engine.runner.cache.layout.windows == GROUPS[case]
        before_each_step(llm.engine, poison_free_blocks)
        oracle.check(llm, [0])
        for which, shared in enumerate(SHARED, 1):
            [output] = llm.generate([oracle.prompts[which]], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == oracle.answers[which]
            assert output.num_cached_tokens == shared
        oracle.check(llm)
        assert llm.stats()["prefix"]["hits"] > sum(map(len, oracle.prompts)) - 4 * BLOCK


@some_families
def test_in_chunks(case: str, oracles: Oracles) -> None:
    oracle = oracles(case)
    for tokens in effort((11,), (1, 2, 3, 7, 11, 16, 33)):
        with open_llm(oracle, max_num_batched_tokens=tokens) as llm:
            oracle.check(llm)


@some_families
def test_preempted_in_a_tiny_pool(case: str, oracles: Oracles) -> None:
    """There is room for one sequence, and every few steps the youngest has to give it up."""
    oracle = oracles(case)
    longest = max(map(len, oracle.prompts)) + NEW_TOKENS
    reach = 7  # blocks of a window and of what two steps write behind it
    blocks = sum(-(-longest // BLOCK) if window is None else reach for window in GROUPS[case])
    settings = {"num_blocks": blocks, "max_model_len": longest, "max_num_batched_tokens": 8}
    with open_llm(oracle, **settings) as llm:
        before_each_step(llm.engine, poison_free_blocks)
        before_each_step(llm.engine, preempt, every=9)
        oracle.check(llm)
        assert llm.stats()["preemptions"] > 4


@some_families
def test_restored_from_the_ssd_after_a_restart(case: str, oracles: Oracles, tmp_path: Path) -> None:
    oracle = oracles(case)
    settings = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB"}
    with open_llm(oracle, **settings) as llm:
        oracle.check(llm)
    with open_llm(oracle, **settings) as llm:
        outputs = llm.generate(oracle.prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == oracle.answers
        found: Counter[str] = Counter()
        for output in outputs:
            found.update(output.cached_tokens_by_tier)
        assert found["ssd"] > max(map(len, oracle.prompts)) / 2


@some_families
def test_on_two_ranks(case: str, oracles: Oracles) -> None:
    oracle = oracles(case)
    with ranks_in_threads(), open_llm(oracle, tensor_parallel_size=2) as llm:
        assert llm.engine.runner.cache.layout.windows == GROUPS[case]
        for _ in ("cold", "warm"):
            oracle.check(llm)


@pytest.mark.parametrize("case", effort(["deepseek-v2"], MIXTURES))
def test_experts_that_are_whole_on_two_ranks(case: str, oracles: Oracles) -> None:
    oracle = oracles(case)
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with ranks_in_threads(), open_llm(oracle, **settings) as llm:
        for _ in ("cold", "warm"):
            oracle.check(llm)


def test_latents_of_two_ranks_are_those_of_one(oracles: Oracles, tmp_path: Path) -> None:
    """One rank writes them, and each of several reads what one has written."""
    oracle = oracles("deepseek-v3")
    settings = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB"}
    sizes = []
    for ranks, tier in ((2, None), (1, "ssd"), (2, "ssd")):
        with open_llm(oracle, tensor_parallel_size=ranks, **settings) as llm:
            outputs = llm.generate(oracle.prompts, GREEDY, use_tqdm=False)
            sizes.append(llm.engine.observed.block_bytes)
        assert [output.outputs[0].token_ids for output in outputs] == oracle.answers
        found = sum((Counter(output.cached_tokens_by_tier) for output in outputs), Counter())
        assert tier is None or found[tier] > max(map(len, oracle.prompts)) / 2
    assert len(set(sizes)) == 1


@forked
def test_forks(case: str, oracles: Oracles) -> None:
    """Samples share what the prompt has left in each group, and are those that are drawn apart."""
    oracle = oracles(case)
    greedy = replace(GREEDY, n=3)
    drawn = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    samples = []
    for max_num_seqs in (8, 1):
        with open_llm(oracle, max_num_seqs=max_num_seqs) as llm:
            for params in (greedy, drawn):
                [output] = llm.generate(oracle.prompts[:1], params, use_tqdm=False)
                samples.append([sample.token_ids for sample in output.outputs])
            assert llm.stats()["forks"]["copied_blocks"] >= len(GROUPS[case])
    assert samples[0] == samples[2] == oracle.answers[:1] * 3
    assert samples[1] == samples[3]


@forked
def test_beams(case: str, oracles: Oracles) -> None:
    oracle = oracles(case)
    expected = oracle.beams()
    with open_llm(oracle) as llm:
        for _ in ("cold", "warm"):
            [output] = llm.beam_search(oracle.prompts[0], BEAMS, use_tqdm=False)
            check_beams(output, expected, BEAMS.length_penalty)


@forked
def test_drafts(case: str, oracles: Oracles) -> None:
    """Of every four drafts one is wrong, so that what they wrote is rolled back."""
    oracle = oracles(case)
    with open_llm(oracle) as llm:
        drafter = ScriptedDrafter(oracle.next_tokens, one_in_four, SHAPE["vocab_size"])
        speculation = speculate(llm.engine, drafter, 5)
        for _ in ("cold", "warm"):
            oracle.check(llm)
        assert 0 < speculation.total.accepted < speculation.total.drafted
