"""Adapters on their way into slots: packed, beside running steps, and in the order of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapted_model import make_model, random_adapter
from families import CASES, SHAPE
from tiny_llm import CONFIG
from torch import Tensor

from quire.models.adapters.model_adapters import ModelAdapters
from quire.runner.adapters import RunnerAdapters

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RANKS = {"of the slots' rank": 16, "of a lower rank": 5}


def raw_config(case: str) -> dict[str, Any]:
    if case == "dense":
        return CONFIG
    name, changes = CASES[case]
    layers = {"num_hidden_layers": 2, "sliding_window": None}
    return {"architectures": [f"{name}ForCausalLM"], **SHAPE, **changes, **layers}


def made(case: str, device: torch.device) -> RunnerAdapters:
    """Slots, and four adapters that host memory has: 0, 1, 2 and 3."""
    slots = ModelAdapters(make_model(raw_config(case)), 3, 16, torch.float32, device)
    ranks = [*RANKS.values()] * 2
    adapters = [random_adapter(slots, i, rank, ends=i == 1) for i, rank in enumerate(ranks)]
    runner = RunnerAdapters(slots, lambda path: adapters[int(path)])
    for i in range(4):
        assert runner.read(str(i)).num_bytes > 0
    return runner


def load(runner: RunnerAdapters, adapter: int, slot: int) -> None:
    runner.load(f"adapter {adapter}", slot)


def contents(runner: RunnerAdapters, slot: int) -> list[Tensor]:
    """All that a slot says of its adapter, copied."""
    found = [runner.slots._table[slot].clone()]
    for matrix in runner.slots.matrices.values():
        slots, count = matrix.slots, matrix.slots.experts
        own, ranks = slice(slot * count, (slot + 1) * count), slots.ranks[slot]
        found += [slots.a[own, : sum(ranks)].clone(), slots.b[own, : max(ranks)].clone()]
        if slots.biased[slot]:
            found.append(slots.bias[own].clone())
    for end in (runner.slots.embedding.of_rows, runner.slots.head.of_head):
        if slot in end:
            found += [tensor.clone() for tensor in end[slot].tensors()]
    return found


def are_equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(a.cpu().equal(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", ["dense", "mixtral"])
def test_one_piece_of_memory_has_all_matrices(case: str) -> None:
    runner = made(case, CPU)
    for kept in runner._kept.values():
        image = kept.image
        room = torch.full((image.packed_bytes,), 7, dtype=torch.uint8)
        pairs = [*zip(image.packed_in(room).for_slots(), image.for_slots(), strict=True)]
        for packed, tensor in pairs:
            packed.copy_(tensor)
        for packed, tensor in pairs:  # that no two have the same place
            assert packed.equal(tensor)
            assert packed.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
        assert image.packed_bytes <= runner.slots.packed_bytes


def test_copies_that_a_gpu_makes_together_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks below the largest leave gaps between experts: PyTorch would copy all one by one."""
    runner, together = made("mixtral", CPU), list[Tensor]()
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda t, s: (together.extend(t), copy(t, s)))
    load(runner, 1, 0)
    assert together and all(target.is_contiguous() for target in together)
    image = runner._kept["adapter 1"].image
    assert len(together) < sum(1 for _ in image.for_slots()) - 1
    for path, matrix in image.matrices.items():
        slots = runner.slots.matrices[path].slots
        for slot, wanted in ((slots.a, matrix.a), (slots.b, matrix.b)):
            found = slot[: slots.experts, : wanted.shape[-2]]
            assert found.reshape(wanted.shape).equal(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["dense", "mixtral"])
def test_a_slot_has_what_was_loaded_last_before_each_step(case: str) -> None:
    """Many loads one behind the other, without a moment's wait on the host."""
    runner, plain = made(case, GPU), made(case, CPU)
    found, wanted = [], []
    for turn in range(24):
        for each, seen in ((runner, found), (plain, wanted)):
            load(each, turn * 7 % 4, turn % 3)
            seen.append(contents(each, turn % 3))
    assert all(map(are_equal, found, wanted))


@pytest.mark.gpu
def test_an_adapter_comes_while_a_step_runs_that_reads_the_slot() -> None:
    runner, plain = made("dense", GPU), made("dense", CPU)
    load(runner, 0, 0)
    load(plain, 0, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # cycles: a step of two seconds
    before = contents(runner, 0)
    runs = torch.cuda.Event()
    runs.record()
    load(runner, 3, 0)
    runner._staging._stream.synchronize()
    assert not runs.query(), "the copy waited for the step"
    after = contents(runner, 0)
    assert are_equal(before, contents(plain, 0))
    load(plain, 3, 0)
    assert are_equal(after, contents(plain, 0))


@pytest.mark.gpu
def test_what_is_forgotten_on_its_way_arrives() -> None:
    runner, plain = made("dense", GPU), made("dense", CPU)
    torch.cuda._sleep(1_000_000_000)
    load(runner, 2, 1)
    runner.forget("adapter 2")
    for _ in range(4):  # which may take the memory that was given back
        torch.zeros(runner.slots.packed_bytes, dtype=torch.uint8, pin_memory=True)
    load(plain, 2, 1)
    assert are_equal(contents(runner, 1), contents(plain, 1))
