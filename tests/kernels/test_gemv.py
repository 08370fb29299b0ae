"""A linear layer for few rows, held against float64 of the same numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from activations import EXACT
from exact_products import check as check_within
from exact_products import exact
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.linear import linear

SHAPES = [  # features, for programs of all sizes; columns of one tile and several, full and ragged
    (64, 64),
    (20, 72),
    (48, 1024),
    (33, 1000),
    (5, 2051),
    (40, 3072),
    (1, 1),
]
HALVES = [torch.float16, torch.bfloat16]
check = partial(check_within, slack=2)


def numbers(rows: int, features: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * features + columns)
    x = torch.randn(rows, columns).to(dtype)
    return x, (torch.randn(features, columns) / columns**0.5).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestGemv:
    @pytest.mark.parametrize("rows", [1, 2])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_is_a_linear_layer(self, triton_device, rows, has_bias, shape, dtype):
        from quire.kernels.triton.gemv import gemv, is_few

        x, weight = numbers(rows, *shape, dtype)
        bias = torch.randn(shape[0]).to(dtype) if has_bias else None
        wanted = exact(x, weight, bias)
        x, weight = x.to(triton_device), weight.to(triton_device)
        assert is_few(x, weight)
        check(gemv(x, weight, None if bias is None else bias.to(triton_device)), wanted)

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_is_added_to_what_is_there(self, triton_device, has_bias, shape, dtype):
        from quire.kernels.triton.gemv import gemv

        x, weight = numbers(2, *shape, dtype)
        there = torch.randn(2, shape[0]).to(dtype)
        bias = torch.randn(shape[0]).to(dtype) if has_bias else None
        wanted = exact(x, weight, bias) + there.double()
        out = there.to(triton_device)
        bias = None if bias is None else bias.to(triton_device)
        found = gemv(x.to(triton_device), weight.to(triton_device), bias, add_to=out)
        assert found is out
        check(out, wanted)

    def test_rows_may_be_part_of_something_wider(self, triton_device, shape, dtype):
        from quire.kernels.triton.gemv import gemv

        x, weight = numbers(2, *shape, dtype)
        wide = torch.full((2, shape[1] + 24), torch.nan, dtype=dtype, device=triton_device)
        part = wide[:, 8 : 8 + shape[1]]
        part.copy_(x)
        check(gemv(part, weight.to(triton_device), None), exact(x, weight, None))

    def test_a_row_does_not_depend_on_the_other(self, triton_device, shape, dtype):
        from quire.kernels.triton.gemv import gemv

        x, weight = (each.to(triton_device) for each in numbers(2, *shape, dtype))
        both = gemv(x, weight, None)
        for row in range(2):
            assert torch.equal(both[row], gemv(x[row : row + 1], weight, None)[0])


def check_gated_linear(subject, activation, rows, has_bias, shape, dtype):
    features, columns = shape
    x, weight = numbers(rows, 2 * features, columns, dtype)
    bias = torch.randn(2 * features).to(dtype) if has_bias else None
    gate, up = exact(x, weight, bias).chunk(2, dim=-1)
    tensors = [t if t is None else t.to(subject.device) for t in (x, weight, bias, None)]
    out = subject.backend.gated_linear(*tensors, activation)
    check(out, EXACT[activation](gate) * up, slack=8)  # what is rounded first is then multiplied


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_gated_by_gelu(subject, rows, dtype):
    check_gated_linear(subject, Activation.GELU_TANH, rows, True, (17, 1040), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("has_bias", [False, True])
class TestEveryBackend:
    @pytest.mark.parametrize("shape", [(24, 64), (17, 1040), (1, 7)], ids=str)
    def test_gated_linear(self, subject, rows, has_bias, shape, dtype):
        check_gated_linear(subject, Activation.SILU, rows, has_bias, shape, dtype)

    def test_linear(self, subject, rows, has_bias, dtype):
        x, weight = numbers(rows, 40, 1040, dtype)
        bias = torch.randn(40).to(dtype) if has_bias else None
        on_device = (
            None if each is None else each.to(subject.device) for each in (x, weight, bias)
        )
        check(linear(*on_device, None), exact(x, weight, bias), slack=16)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.zeros(0, 8, dtype=torch.float16), id="no-rows"),
        pytest.param(torch.zeros(3, 8, dtype=torch.float16), id="many-rows"),
        pytest.param(torch.zeros(1, 8), id="float32"),
        pytest.param(torch.zeros(8, 2, dtype=torch.float16).t(), id="by-columns"),
    ],
)
def test_what_is_left_to_torch(triton_device, x):
    from quire.kernels.triton.gemv import is_few

    assert not is_few(x, torch.zeros(4, 8, dtype=x.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [1024, 4096])
@pytest.mark.parametrize("features", [1024, 2560, 4096, 6144, 12288])
def test_the_shapes_of_models(features, columns, rows, activation):
    from quire.kernels.triton.gemv import gemv

    halves = 1 if activation is None else 2
    x, weight = numbers(rows, halves * features, columns, torch.bfloat16)
    wanted = exact(x, weight, None)
    if activation is not None:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = EXACT[activation](gate) * up
    check(gemv(x.cuda(), weight.cuda(), None, activation), wanted, slack=8)


@pytest.mark.gpu
def test_a_chain_replayed_from_a_graph():
    """Kernels of a chain start early; none may see what the one before has not written yet."""
    from quire.kernels.triton import TritonBackend

    hidden, features, layers = 1024, 3072, 12
    backend, dtype, cuda = TritonBackend(), torch.bfloat16, "cuda"
    torch.manual_seed(0)
    norm = torch.ones(hidden, dtype=dtype, device=cuda)
    gates = torch.randn(layers, 2 * features, hidden, dtype=dtype, device=cuda) / 32
    downs = torch.randn(layers, hidden, features, dtype=dtype, device=cuda) / 55

    def forward(x: Tensor) -> Tensor:
        stream, delta = x.clone(), None
        for gate, down in zip(gates, downs, strict=True):
            normed = backend.add_rms_norm(stream, delta, norm, 1e-6)
            gated = backend.gated_linear(normed, gate, None, None, Activation.SILU)
            delta = linear(gated, down, None, None)
        return backend.add_rms_norm(stream, delta, norm, 1e-6)

    for rows in (1, 2):
        given = torch.zeros(rows, hidden, dtype=dtype, device=cuda)
        forward(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(given)
        inputs = torch.randn(50, rows, hidden, dtype=dtype, device=cuda)
        replayed = []
        for x in inputs:  # one after another, with nothing waited for in between
            given.copy_(x)
            graph.replay()
            replayed.append(out.clone())
        for x, got in zip(inputs, replayed, strict=True):
            wanted = forward(x)
            torch.cuda.synchronize()
            assert torch.equal(got, wanted)
