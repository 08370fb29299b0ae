"""A matrix and the slots of its adapters, which lie behind it in memory."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from random_slots import on, random_batch, random_slots
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapted_product import AdaptedProduct
from quire.kernels.adapter_slots import NO_ADAPTER, AdapterSlots, SlotRun
from quire.kernels.adapters import add_plainly
from quire.kernels.reference import ReferenceBackend
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.adapters.matrix import AdaptedMatrix
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.linear import RowLinear
from quire.layers.matrix import DenseMatrix
from quire.layers.norm import RMSNorm
from quire.layers.tp import SINGLE

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU",
)


def adapted(slots: AdapterSlots, weight: Tensor) -> AdaptedMatrix:
    base = DenseMatrix(*weight.shape)
    base.make_room(weight.dtype, weight.device)
    base.weight.copy_(weight)
    adapters = MatrixAdapters(weight.shape[1], slots.sizes, ActiveAdapters())
    adapters.slots = slots
    return AdaptedMatrix(base, adapters)


def test_a_matrix_and_its_slots_are_joined_and_stay_what_they_were() -> None:
    slots = random_slots(4, [40, 24], 16, 2, 0)
    weight, x = torch.randn(64, 16), torch.randn(5, 16)
    matrix = adapted(slots, weight)
    before = matrix.multiply(x, None)
    matrix.join()
    joined = matrix.adapters.slots.a
    assert joined.data_ptr() == matrix.base.weight[-1].data_ptr() + weight[-1].nbytes
    assert torch.equal(torch.nan_to_num(joined), torch.nan_to_num(slots.a))
    assert torch.equal(matrix.multiply(x, None), before)


def test_slots_that_are_many_beside_the_matrix_stay_apart() -> None:
    slots = random_slots(8, [40, 24], 16, 2, 0)  # 32 rows of `a`, where the matrix has 64
    matrix = adapted(slots, torch.randn(64, 16))
    matrix.join()
    assert matrix.adapters.slots is slots


MIXED = (2, 0, NO_ADAPTER, 4)


def test_few_long_runs_are_told_from_many_short_ones() -> None:
    long = [2] * 1100 + [NO_ADAPTER] * 1200 + [4] * 1025
    assert random_batch(long).long_runs == (
        SlotRun(2, slice(0, 1100)),
        SlotRun(NO_ADAPTER, slice(1100, 2300)),
        SlotRun(4, slice(2300, 3325)),
    )
    for rows in ([], [2], [2] * 1000, [2] * 1000 + [4] * 1000, [2, 4] * 1100):
        assert random_batch(rows).long_runs == ()


def test_what_is_shrunk_is_of_one_tensor_and_taken_once() -> None:
    active, x, hidden = ActiveAdapters(), torch.randn(3, 8), torch.randn(3, 2)
    active.put_shrunk(x, hidden)
    assert active.take_shrunk(x) is hidden
    assert active.take_shrunk(x) is None
    active.put_shrunk(x, hidden)
    assert active.take_shrunk(x.clone()) is None
    assert active.take_shrunk(x) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows",
    [(MIXED * 275)[:count] for count in (1, 2, 7, 130, 1100)]
    + [[2] * 1100 + [NO_ADAPTER] * 1200 + [4] * 1025, [0] * 1030],
    ids=len,
)
def test_products_of_any_number_of_rows_are_the_plain_sums_on_a_gpu(rows: list[int]) -> None:
    """Each has launches of its own: few rows, a joint product, `shrink`, and long runs."""
    from quire.kernels.triton import TritonBackend

    half, backend = torch.float16, TritonBackend()
    slots = random_slots(5, [512, 512], 256, 16, 0, half)
    weight = (torch.randn(1024, 256) / 16).to(half)
    batch = random_batch(rows)
    assert len(batch.long_runs) == (len({*rows}) if len(rows) > 1000 and rows[0] == rows[1] else 0)
    x = torch.randn(len(rows), 256).to(half)
    wanted = torch.nn.functional.linear(x, weight)
    add_plainly(x, slots, batch, wanted)
    gate, up = wanted.float().chunk(2, dim=1)
    slots, batch = on("cuda", slots, batch)
    matrix = adapted(slots, weight.cuda())
    matrix.join()
    matrix.adapters.active.batch = batch
    found = matrix.multiply(x.cuda(), None).cpu()
    torch.testing.assert_close(found, wanted, rtol=4e-3, atol=4e-3)
    gated = matrix.gated(x.cuda(), None, backend, Activation.SILU).cpu()
    torch.testing.assert_close(
        gated.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("count", [1, 3, 20, 129])
def test_a_norm_behind_a_matrix_adds_what_its_adapters_do(count: int, device: str) -> None:
    """To one row and to many, they add before it. A graph reads which slots the rows use when it is
    replayed."""
    from quire.kernels.triton import TritonBackend

    half, rows, sizes = torch.float16, (MIXED * 33)[:count], ((count, 64), (count, 512), (512,))
    slots, batch = random_slots(5, [512], 64, 16, 0, half), random_batch(rows)
    weight = (torch.randn(512, 64) / 8).to(half)
    x, stream, scale = (torch.randn(*shape).to(half) for shape in sizes)
    product, wanted_stream = torch.nn.functional.linear(x, weight), stream.clone()
    add_plainly(x, slots, batch, product)
    wanted = ReferenceBackend().add_rms_norm(wanted_stream, product, scale, 1e-5)

    linear, norm, backend = RowLinear(64, 512, False, SINGLE), RMSNorm(512, 1e-5), TritonBackend()
    slots, other = on(device, slots, random_batch(rows[::-1]))
    x, there, weight = x.to(device), stream.to(device, copy=True), weight.to(device)
    norm.weight = torch.nn.Parameter(scale.to(device), requires_grad=False)
    linear.matrix = matrix = adapted(slots, weight)
    matrix.join()
    matrix.adapters.active.batch = other
    assert isinstance(linear.delta(x), AdaptedProduct) == (2 < count <= 128)

    def run() -> Tensor:
        return norm(there, linear.delta(x), backend)

    found = run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    for name in ("slots", "order", "tiles"):
        getattr(other, name).copy_(getattr(batch, name))
    there.copy_(stream)
    if device == "cuda":
        graph.replay()
    else:
        other = matrix.adapters.active.batch = batch
        found = run()
    torch.testing.assert_close(there.cpu(), wanted_stream, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows", [[2] * 1100 + [NO_ADAPTER] * 1200 + [4] * 1025, [0] * 1030], ids=len
)
def test_a_gate_and_the_matrix_that_reads_it_are_the_plain_sums_on_a_gpu(rows: list[int]) -> None:
    """What the second needs of its adapters is found by the kernel of the gate."""
    from quire.kernels.triton import TritonBackend

    half, backend, batch = torch.float16, TritonBackend(), random_batch(rows)
    slots = random_slots(5, [1024, 1024], 256, 16, 0, half)
    reader = random_slots(5, [256], 1024, 16, 1, half)
    weight = (torch.randn(2048, 256) / 16).to(half)
    down = (torch.randn(256, 1024) / 32).to(half)
    x = torch.randn(len(rows), 256).to(half)
    both = torch.nn.functional.linear(x, weight)
    add_plainly(x, slots, batch, both)
    gate, up = both.float().chunk(2, dim=1)
    gated = (torch.nn.functional.silu(gate) * up).to(half)
    wanted = torch.nn.functional.linear(gated, down)
    add_plainly(gated, reader, batch, wanted)
    slots, batch = on("cuda", slots, batch)
    reader, _ = on("cuda", reader, batch)
    first, second = adapted(slots, weight.cuda()), adapted(reader, down.cuda())
    second.adapters.active = first.adapters.active
    first.reader = second.adapters
    first.adapters.active.batch = batch
    found = first.gated(x.cuda(), None, backend, Activation.SILU)
    assert first.adapters.active._shrunk is not None
    found = second.multiply(found, None).cpu()
    assert first.adapters.active._shrunk is None
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
