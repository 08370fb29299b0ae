"""What adapters add to products: every way to compute it against the plain one, row by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_slots import random_batch, random_slots
from torch import Tensor

from quire.kernels.adapter_slots import (
    NO_ADAPTER,
    AdapterBatch,
    AdapterSlots,
    SortedRows,
    most_tiles,
    tile_rows,
)
from quire.kernels.adapters import add_adapters, add_by_groups, add_plainly, has_cpu_kernel

VECTOR = 16  # numbers, of which the CPU's kernel has whole ones
Add = Callable[[Tensor, AdapterSlots, AdapterBatch, Tensor], None]


@st.composite
def row_slots(draw: st.DrawFn) -> list[int]:
    """None at all, all of one slot, long runs, or a mixture."""
    slot = st.integers(NO_ADAPTER, 4)
    runs = draw(st.lists(st.tuples(slot, st.integers(1, 40)), max_size=6))
    return [slot for slot, count in runs for _ in range(count)] + draw(st.lists(slot, max_size=9))


@given(slots=row_slots())
def test_every_row_is_in_one_tile_of_its_slot(slots: list[int]) -> None:
    rows = SortedRows.of(np.array(slots, dtype=np.int32))
    size = tile_rows(len(slots), 5)
    tiles = np.full((3, most_tiles(len(slots), 5)), 99, dtype=np.int32)
    rows.write_tiles(size, tiles)
    found: list[int] = []
    for slot, begin, end in tiles.T.tolist():
        assert (slot == NO_ADAPTER or begin < end) and end - begin <= size
        own = rows.order[begin:end].tolist()
        assert all(slots[row] == slot for row in own)
        found += own
    assert sorted(found) == list(range(len(slots)))
    grouped = [(slot, torch.arange(len(slots))[of].tolist()) for slot, of in rows.groups()]
    having = [row for row, slot in enumerate(slots) if slot != NO_ADAPTER]
    assert sorted(row for _, own in grouped for row in own) == having
    assert all(slots[row] == slot for slot, own in grouped for row in own)


def kernel(x: Tensor, slots: AdapterSlots, batch: AdapterBatch, out: Tensor) -> None:
    """That of a CPU, which has to take this."""
    pytest.importorskip("numba")
    from quire.kernels.numba.adapters import add, takes

    assert has_cpu_kernel(x.dtype) and takes(x, slots, out)
    add(x, slots, batch, out)


@settings(max_examples=40)
@given(
    slots=row_slots(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    inputs=st.integers(1, 50),
    most_rank=st.sampled_from([1, 3, 8, 16, 40, 256]),
    seed=st.integers(0, 99),
)
def test_torch_adds_what_the_plain_sums_are(
    slots: list[int], sizes: list[int], inputs: int, most_rank: int, seed: int
) -> None:
    check(add_by_groups, slots, sizes, inputs, most_rank, seed, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    slots=row_slots(),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    inputs=st.integers(1, 5),
    most_rank=st.sampled_from([1, 3, 8, 16, 40, 256]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_the_kernel_adds_what_the_plain_sums_are(
    slots: list[int],
    sizes: list[int],
    inputs: int,
    most_rank: int,
    seed: int,
    dtype: torch.dtype,
    threads: int,
) -> None:
    sizes, inputs = [VECTOR * size for size in sizes], VECTOR * inputs
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(kernel, slots, sizes, inputs, most_rank, seed, dtype)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "inputs"), [([32, 16], 32), ([24, 8, 8], 32), ([16], 20)])
def test_a_cpu_adds_whatever_the_widths(sizes: list[int], inputs: int, dtype: torch.dtype) -> None:
    check(add_adapters, [0, 1, -1, 1, 2, 2], sizes, inputs, 16, 0, dtype)


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from quire.kernels.numba.kernels import adapter_kernel

    def fail(dtype: torch.dtype) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(adapter_kernel, "compile", fail)
    has_cpu_kernel.cache_clear()
    try:
        check(add_adapters, [0, -1, 2], [16], 16, 4, 0, torch.float32)
        assert not has_cpu_kernel(torch.float32)
    finally:
        has_cpu_kernel.cache_clear()


@settings(max_examples=20, deadline=None)
@given(slots=row_slots(), count=st.integers(1, 3), by_kernel=st.booleans())
def test_every_row_with_every_expert(slots: list[int], count: int, by_kernel: bool) -> None:
    """Pairs, numbered row by row, each as the plain sums have it."""
    add = kernel if by_kernel else add_by_groups
    adapters = random_slots(5, [16, 32], 16, 5, len(slots), experts=count)
    batch = random_batch(slots).with_all_experts(count)
    assert batch.slots.tolist() == [
        NO_ADAPTER if slot < 0 else slot * count + expert
        for slot in slots
        for expert in range(count)
    ]
    x, before = torch.randn(len(slots) * count, 16), torch.randn(len(slots) * count, 48)
    wanted, found = before.clone(), before.clone()
    add_plainly(x, adapters, batch, wanted)
    add(x, adapters, batch, found)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def check(
    add: Add,
    slots: list[int],
    sizes: list[int],
    inputs: int,
    most_rank: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """`x` and `out` are columns of wider tensors, as some layers have them."""
    torch.manual_seed(seed)
    adapters = random_slots(5, sizes, inputs, most_rank, seed, dtype)
    batch = random_batch(slots)
    x = torch.randn(len(slots), inputs + 3).to(dtype)[:, :inputs]
    before = torch.randn(len(slots), sum(sizes) + 5).to(dtype)
    wanted, found = before.clone(), before.clone()
    add_plainly(x, adapters, batch, wanted[:, : sum(sizes)])
    add(x, adapters, batch, found[:, : sum(sizes)])
    error = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)
    without = [row for row, slot in enumerate(slots) if slot == NO_ADAPTER]
    assert torch.equal(found[without], before[without])
    assert torch.equal(found[:, sum(sizes) :], before[:, sum(sizes) :])
