"""Every family over several ranks that exchange their parts by Gloo: the logits are the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import CASES, PROMPT, Oracle
from paged import PagedModel
from patience import PATIENCE_S

from quire.kernels.backend import backend_for
from quire.layers.tp import TensorParallel
from quire.models.source import build_model, open_model
from quire.ranks.group import Group

CPU = torch.device("cpu")


@pytest.fixture
def meeting() -> Iterator[int]:
    file = os.memfd_create("a test's ranks")
    yield file
    os.close(file)


def compute(
    oracle: Oracle, rank: int, size: int, meeting: int, expert_parallel: bool = False
) -> None:
    """A prompt in two pieces and some tokens behind it; only rank 0 has logits to look at."""
    group = Group(rank, size, CPU, meeting)
    tp = TensorParallel(rank, size, group, expert_parallel)
    source = open_model(str(oracle.folder))
    model = build_model(source, torch.float32, CPU, progress=False, tp=tp)
    group.connect()
    paged = PagedModel(model, backend_for(CPU), block_size=16)
    for start, end in [(0, 33), (33, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + 4))]:
        logits = paged.step({"a": oracle.ids[start:end]})["a"]
        if rank == 0:
            oracle.check(logits, start)
    group.close()


# Two ranks for each (scaled positions are the same on all); of some as many as KV heads, and more.
SIZES = [(case, 2) for case in CASES if "llama-rope" not in case]
SIZES += [("llama-mha", 3), ("llama-bias", 6), ("llama-mqa-tied", 3), ("qwen3-tied-bias", 6)]
SIZES += [("olmo2", 6), ("phi3-partial-long", 6)]


EXPERT_PARALLEL = [("mixtral", 2), ("qwen2-moe", 2), ("qwen3-moe", 6), ("gpt-oss-mxfp4", 2)]
EXPERT_PARALLEL += [("deepseek-v2", 2), ("deepseek-v3", 2)]


@pytest.mark.parametrize(("case", "size"), SIZES)
def test_all_ranks_together_are_the_model(
    case: str, size: int, meeting: int, tmp_path: Path
) -> None:
    compute_together(Oracle(case, tmp_path, intermediate_size=192), size, meeting)


@pytest.mark.parametrize(("case", "size"), EXPERT_PARALLEL)
def test_experts_that_are_whole_on_their_ranks(
    case: str, size: int, meeting: int, tmp_path: Path
) -> None:
    compute_together(Oracle(case, tmp_path, intermediate_size=192), size, meeting, True)


def compute_together(
    oracle: Oracle, size: int, meeting: int, expert_parallel: bool = False
) -> None:
    with ThreadPoolExecutor(size) as threads:
        ranks = [(oracle, rank, size, meeting, expert_parallel) for rank in range(size)]
        for each in [threads.submit(compute, *rank) for rank in ranks]:
            each.result(PATIENCE_S)


def test_a_group_of_one_rank_changes_nothing(meeting: int, tmp_path: Path) -> None:
    compute(Oracle("llama-bias", tmp_path), 0, 1, meeting)


def test_silent_ranks_exchange_nothing(meeting: int) -> None:
    """Only shapes are right then, as many as there are ranks."""
    group = Group(0, 3, CPU, meeting)
    x = torch.ones(2, 5)
    with group.silence():
        assert torch.equal(TensorParallel(0, 3, group).all_reduce(x), torch.ones(2, 5))
        assert TensorParallel(0, 3, group).gather(x).shape == (2, 15)
    assert group.num_calls == 0
