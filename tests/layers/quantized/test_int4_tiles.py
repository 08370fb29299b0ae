"""Four-bit matrices in a GPU's order: the same numbers, and the same products."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import Activation
from quire.kernels.reference import ReferenceBackend
from quire.layers.quantized.grouped import Grouped, GroupedMatrix
from quire.layers.weights import make_room

needs_triton = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU (its kernels are tested there)",
)
DEVICES = [
    pytest.param("cpu", marks=needs_triton, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
KINDS = {
    "around the middle": Grouped(group=128, scale_dtype=torch.float16),
    "zeros": Grouped(group=32, has_zeros=True, scale_dtype=torch.float16),
    "whole rows": Grouped(has_zeros=True, scale_dtype=torch.float32),
    "by index": Grouped(group=64, has_zeros=True, by_index=True, scale_dtype=torch.float16),
}


def filled(kind: Grouped, out_features: int, in_features: int, device: str) -> GroupedMatrix:
    with torch.device("meta"):
        matrix = GroupedMatrix(out_features, in_features, kind)
    make_room(matrix, torch.float16, torch.device(device))
    torch.manual_seed(out_features + in_features)
    matrix.weight.copy_(torch.randint(0, 256, matrix.weight.shape))
    matrix.weight_scale.copy_(torch.rand(matrix.weight_scale.shape) / in_features**0.5)
    if matrix.weight_zero is not None:
        matrix.weight_zero.copy_(torch.randint(0, 16, matrix.weight_zero.shape))
    if matrix.group_index is not None:
        matrix.group_index.copy_(torch.randperm(in_features) // matrix.group)
    return matrix


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_numbers_and_products(name: str, device: str) -> None:
    matrix = filled(KINDS[name], 96, 384, device)
    dense, size = matrix.dense(), matrix.weight.data_ptr()
    matrix.lay_in_tiles()
    assert matrix.weight.data_ptr() == size  # in its own place
    assert torch.equal(matrix.dense(), dense)
    indices = torch.tensor([95, 0, 17, 17], device=device)
    assert torch.equal(matrix.rows(indices), dense[indices])

    x = torch.randn(3, 384, device=device)
    bias = torch.randn(96, device=device)
    torch.testing.assert_close(matrix.multiply(x, bias), F.linear(x, dense, bias))
    wanted = F.linear(x.half().float(), dense.half().float(), bias.half().float())
    close = {"atol": 4e-3, "rtol": 4e-3}
    found = matrix.multiply(x.half(), bias.half())
    torch.testing.assert_close(found.float(), wanted, **close)
    gate, up = wanted.chunk(2, dim=-1)
    found = matrix.gated(x.half(), bias.half(), ReferenceBackend(), Activation.SILU)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "kind, shape",
    [
        pytest.param(Grouped(group=128), (40, 384), id="rows"),
        pytest.param(Grouped(group=64), (32, 192), id="columns"),
        pytest.param(Grouped(group=16), (32, 384), id="groups"),
        pytest.param(Grouped(bits=8, group=128), (32, 384), id="bits"),
    ],
)
def test_what_has_no_tiles_stays_as_it_is(kind: Grouped, shape: tuple[int, int]) -> None:
    matrix = filled(kind, *shape, "cpu")
    stored = matrix.weight.clone()
    matrix.lay_in_tiles()
    assert torch.equal(matrix.weight, stored)
    x = torch.randn(3, shape[1]).half()
    torch.testing.assert_close(matrix.multiply(x, None), F.linear(x, matrix.dense().half()))


def test_groups_of_different_sizes_stay_as_they_are() -> None:
    matrix = filled(KINDS["by index"], 32, 256, "cpu")
    assert matrix.group_index is not None
    matrix.group_index[matrix.group_index == 0] = 1
    dense = matrix.dense()
    matrix.lay_in_tiles()
    assert torch.equal(matrix.dense(), dense)


@pytest.mark.gpu
def test_a_chain_replayed_from_a_graph() -> None:
    """Kernels of a chain start early; none may see what the one before has not written yet."""
    from quire.kernels.triton import TritonBackend

    hidden, features, layers = 1024, 3072, 8
    backend, kind = TritonBackend(), Grouped(group=128, has_zeros=True)
    gates = [filled(kind, 2 * features, hidden, "cuda") for _ in range(layers)]
    downs = [filled(kind, hidden, features, "cuda") for _ in range(layers)]
    for matrix in gates + downs:
        matrix.lay_out()
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    def forward(x: torch.Tensor) -> torch.Tensor:
        stream, delta = x.clone(), None
        for gate, down in zip(gates, downs, strict=True):
            normed = backend.add_rms_norm(stream, delta, norm, 1e-6)
            delta = down.multiply(gate.gated(normed, None, backend, Activation.SILU), None)
        return backend.add_rms_norm(stream, delta, norm, 1e-6)

    for rows in (1, 20, 100):
        given = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
        forward(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(given)
        inputs = torch.randn(20, rows, hidden, dtype=torch.bfloat16, device="cuda")
        replayed = []
        for x in inputs:  # one after another, with nothing waited for in between
            given.copy_(x)
            graph.replay()
            replayed.append(out.clone())
        for x, got in zip(inputs, replayed, strict=True):
            wanted = forward(x)
            torch.cuda.synchronize()
            assert torch.equal(got, wanted)
