"""A GPU's kernels for adapters against the plain sums, row by row."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, groupby

import pytest
import torch
from activations import EXACT
from random_slots import on, random_batch, random_slots

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import FEW_ROWS, NO_ADAPTER, SlotRun
from quire.kernels.adapters import add_plainly

pytest.importorskip("triton")

# Slots of the rows: of one sequence, of several, runs as in prompts, and without any adapter.
ROWS = [
    [0],
    [3, NO_ADAPTER],
    [1, 1, NO_ADAPTER, 0, 4, 1, NO_ADAPTER],
    [2] * 20 + [NO_ADAPTER] * 3 + [0] * 17 + [2, 4] * 2,
    [NO_ADAPTER] * 3,
    [],
]
SHAPES = [  # features of the outputs, columns, the largest rank
    ([24], 40, 4),
    ([130, 64, 64], 300, 16),
    ([7, 9], 33, 80),
]
NEAR = {torch.float32: 1e-4, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=len)
def test_shrunk_and_expanded_are_the_plain_sums(triton_device, rows, shape, dtype):
    from quire.kernels.triton.adapters.expand import expand
    from quire.kernels.triton.adapters.shrink import shrink

    sizes, columns, rank = shape
    slots, batch = random_slots(5, sizes, columns, rank, len(rows), dtype), random_batch(rows)
    x = torch.randn(len(rows), columns + 8).to(dtype)[:, :columns]
    before = torch.randn(len(rows), sum(sizes) + 8).to(dtype)
    wanted = before.clone()
    add_plainly(x, slots, batch, wanted[:, : sum(sizes)])
    slots, batch = on(triton_device, slots, batch)
    found, x = before.to(triton_device), x.to(triton_device)
    expand(shrink(x, slots, batch), slots, batch, found[:, : sum(sizes)])
    found = found.cpu()
    torch.testing.assert_close(found, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    without = [row for row, slot in enumerate(rows) if slot == NO_ADAPTER]
    assert torch.equal(found[without], before[without])


@pytest.mark.parametrize("rank", [4, 80])
def test_slots_of_few_rows_have_turned_tiles(triton_device, rank):
    """Of 36 slots, each with a row or two or, one of them, with more than a tile has: of three
    outputs, and of a gate."""
    from quire.kernels.triton.adapters.expand import expand
    from quire.kernels.triton.adapters.expand_gated import expand_gated
    from quire.kernels.triton.adapters.shrink import shrink

    rows = [*range(36), NO_ADAPTER, *range(0, 36, 3), *[7] * 9]
    x = torch.randn(len(rows), 40)
    for sizes in ([600, 64, 64], [300, 300]):
        slots, batch = random_slots(36, sizes, 40, rank, 1), random_batch(rows, 36)
        assert batch.tile_rows == FEW_ROWS
        before = torch.randn(len(rows), sum(sizes))
        wanted = before.clone()
        add_plainly(x, slots, batch, wanted)
        slots, batch = on(triton_device, slots, batch)
        found, hidden = before.to(triton_device), shrink(x.to(triton_device), slots, batch)
        if len(sizes) == 2:
            gate, up = wanted.chunk(2, 1)
            gated = expand_gated(hidden, slots, batch, found, Activation.SILU).cpu()
            torch.testing.assert_close(
                gated, EXACT[Activation.SILU](gate) * up, rtol=1e-4, atol=1e-4
            )
        expand(hidden, slots, batch, found)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS, ids=len)
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_of_rows_have_adapters_of_their_own(triton_device, rows, has_bias):
    """Pairs of a row and a head, as latent attention has them: rows of a wider tensor. Where no
    adapter can have a bias, there is no memory for one."""
    from quire.kernels.triton.adapters.expand import expand
    from quire.kernels.triton.adapters.shrink import shrink

    heads, inputs, features = 3, 24, 40
    slots = random_slots(5, [features], inputs, 16, len(rows), experts=heads)
    if not has_bias:
        none = {"bias": torch.empty(5 * heads, 0), "is_biased": torch.zeros(5, dtype=torch.int32)}
        slots = replace(slots, **none, biased=[False] * 5)
    batch = random_batch(rows)
    x = torch.randn(len(rows) * heads, inputs + 8)[:, :inputs]
    before = torch.randn(len(rows) * heads, features + 8)
    wanted = before.clone()
    add_plainly(x, slots, batch.with_all_experts(heads), wanted[:, :features])
    slots, batch = on(triton_device, slots, batch)
    found, pairs = before.to(triton_device), batch.with_all_experts(heads)
    hidden = shrink(x.to(triton_device), slots, pairs)
    expand(hidden, slots, pairs, found[:, :features])
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", list(Activation), ids=str)
@pytest.mark.parametrize("rows", ROWS[:5], ids=len)
def test_a_gate_is_that_of_the_sums(triton_device, rows, activation):
    from quire.kernels.triton.adapters.expand_gated import expand_gated
    from quire.kernels.triton.adapters.shrink import shrink

    slots, batch = random_slots(5, [70, 70], 50, 20, 1), random_batch(rows)
    x, product = torch.randn(len(rows), 50), torch.randn(len(rows), 140)
    wanted = product.clone()
    add_plainly(x, slots, batch, wanted)
    gate, up = wanted.chunk(2, dim=1)
    slots, batch = on(triton_device, slots, batch)
    x, product = x.to(triton_device), product.to(triton_device)
    found = expand_gated(shrink(x, slots, batch), slots, batch, product, activation)
    torch.testing.assert_close(found.cpu(), EXACT[activation](gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, ([72, 72], 50, 20)], ids=str)
@pytest.mark.parametrize("rows", ROWS[1:5], ids=len)
def test_all_slots_may_be_multiplied_with_the_matrix(triton_device, rows, shape):
    """The product of both is not written over, and what slots in no use make of x is not read."""
    from quire.kernels.triton.adapters.expand import expanded
    from quire.kernels.triton.adapters.expand_gated import expand_gated

    sizes, columns, rank = shape
    features = sum(sizes)
    slots, batch = random_slots(5, sizes, columns, rank, len(rows)), random_batch(rows)
    x, weight = torch.randn(len(rows), columns), torch.randn(features, columns) * columns**-0.5
    both = x @ torch.cat((weight, slots.a.flatten(0, 1))).T
    wanted = both[:, :features].clone()
    add_plainly(x, slots, batch, wanted)
    slots, batch = on(triton_device, slots, batch)
    both = both.to(triton_device)
    product, hidden = both[:, :features], both[None, :, features:]
    found = expanded(hidden, slots, batch, product)
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        gate, up = wanted.chunk(2, dim=1)
        found = expand_gated(hidden, slots, batch, product, Activation.SILU)
        torch.testing.assert_close(
            found.cpu(), EXACT[Activation.SILU](gate) * up, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", ROWS[:2], ids=len)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_rows_are_multiplied_and_shrunk_in_one_launch(triton_device, shape, rows, has_bias):
    from quire.kernels.triton.adapters.expand import expand
    from quire.kernels.triton.adapters.few import gemv_and_shrink
    from quire.kernels.triton.gemv import gemv

    sizes, columns, rank = shape
    half = torch.float16
    slots, batch = random_slots(5, sizes, columns, rank, 2, half), random_batch(rows)
    x = torch.randn(len(rows), columns).to(half)
    weight = (torch.randn(sum(sizes), columns) * columns**-0.5).to(half)
    bias = torch.randn(sum(sizes)).to(half) if has_bias else None
    wanted = torch.nn.functional.linear(x, weight, bias)
    add_plainly(x, slots, batch, wanted)
    slots, batch = on(triton_device, slots, batch)
    x, weight = x.to(triton_device), weight.to(triton_device)
    bias = None if bias is None else bias.to(triton_device)
    out, hidden = gemv_and_shrink(x, weight, bias, slots, batch)
    assert torch.equal(out, gemv(x, weight, bias))
    expand(hidden, slots, batch, out)
    torch.testing.assert_close(out.cpu(), wanted, rtol=4e-3, atol=4e-3)


def unbiased_slots(*args, **more):
    """Those with a bias have no kernels for runs."""
    slots = random_slots(*args, **more)
    return replace(slots, is_biased=torch.zeros_like(slots.is_biased), biased=[False] * 5)


def runs_of(rows: list[int]) -> tuple[SlotRun, ...]:
    slots, lengths = zip(*((slot, len(list(each))) for slot, each in groupby(rows)), strict=True)
    begins = [0, *accumulate(lengths)]
    return tuple(map(SlotRun, slots, map(slice, begins, begins[1:])))


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS[1:4], ids=len)
def test_runs_get_the_plain_sums(triton_device, rows, shape, dtype):
    """Added to a product, and written before it is computed."""
    from quire.kernels.triton.adapters.runs import add_runs, multiply_runs, shrink_runs

    sizes, columns, rank = shape
    slots, batch = unbiased_slots(5, sizes, columns, rank, len(rows), dtype), random_batch(rows)
    x = torch.randn(len(rows), columns).to(dtype)
    weight = (torch.randn(sum(sizes), columns) * columns**-0.5).to(dtype)
    product = torch.nn.functional.linear(x, weight)
    wanted = product.clone()
    add_plainly(x, slots, batch, wanted)
    slots, _ = on(triton_device, slots, batch)
    x, weight, found = (each.to(triton_device) for each in (x, weight, product))
    hidden = shrink_runs(x, slots, runs_of(rows))
    add_runs(hidden, slots, runs_of(rows), found)
    torch.testing.assert_close(found.cpu(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    found = multiply_runs(x, weight, hidden, slots, runs_of(rows))
    torch.testing.assert_close(found.cpu(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("activation", list(Activation), ids=str)
@pytest.mark.parametrize("rank", [20, 80])
@pytest.mark.parametrize("rows", ROWS[1:5], ids=len)
def test_a_gate_of_runs_is_that_of_the_sums(triton_device, rows, rank, activation):
    from quire.kernels.triton.adapters.gated_runs import gated_runs
    from quire.kernels.triton.adapters.runs import shrink_runs

    slots, batch = unbiased_slots(5, [70, 70], 50, rank, 1), random_batch(rows)
    x, product = torch.randn(len(rows), 50), torch.randn(len(rows), 140)
    wanted = product.clone()
    add_plainly(x, slots, batch, wanted)
    gate, up = wanted.chunk(2, dim=1)
    slots, _ = on(triton_device, slots, batch)
    x, product = x.to(triton_device), product.to(triton_device)
    shrunk = shrink_runs(x, slots, runs_of(rows))
    found, hidden = gated_runs(shrunk, slots, runs_of(rows), product, activation)
    torch.testing.assert_close(found.cpu(), EXACT[activation](gate) * up, rtol=1e-4, atol=1e-4)
    assert hidden is None


@pytest.mark.parametrize("features", [70, 1600])  # of one part, and of several
@pytest.mark.parametrize("rows", ROWS[1:5], ids=len)
def test_a_gate_of_runs_is_multiplied_for_the_matrix_that_reads_it(triton_device, rows, features):
    from quire.kernels.triton.adapters.gated_runs import can_shrink, gated_runs
    from quire.kernels.triton.adapters.runs import shrink_runs

    slots, batch = unbiased_slots(5, [features] * 2, 24, 16, 1), random_batch(rows)
    reader = unbiased_slots(5, [40], features, 20, 2)
    x, product = torch.randn(len(rows), 24), torch.randn(len(rows), 2 * features)
    slots, _ = on(triton_device, slots, batch)
    reader, _ = on(triton_device, reader, batch)
    x, product = x.to(triton_device), product.to(triton_device)
    assert can_shrink(reader)
    silu = Activation.SILU
    shrunk = shrink_runs(x, slots, runs_of(rows))
    found, hidden = gated_runs(shrunk, slots, runs_of(rows), product, silu, reader)
    alone, _ = gated_runs(shrunk, slots, runs_of(rows), product, silu)
    assert torch.equal(found, alone)
    for row, slot in enumerate(rows):
        if slot != NO_ADAPTER:
            rank = reader.ranks[slot][0]
            wanted = reader.a[slot, :rank] @ found[row]
            torch.testing.assert_close(hidden[row, :rank], wanted, rtol=1e-4, atol=1e-4)


def test_ranks_beyond_one_product_are_not_multiplied_by_a_gate():
    from quire.kernels.triton.adapters.gated_runs import can_shrink

    assert can_shrink(random_slots(2, [40], 70, 64, 0))
    assert not can_shrink(random_slots(2, [40], 70, 65, 0))
