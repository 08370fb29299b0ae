"""Quantised matrices: products are those of `dense()`, and what is made is near what it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import Activation
from quire.kernels.dequantise import E2M1, from_e8m0, from_fp4, pack_nibbles, unpack_nibbles
from quire.kernels.fp8 import FP8
from quire.kernels.quantise import FP8_LARGEST, OCTAVE, to_fp8
from quire.kernels.reference import ReferenceBackend
from quire.layers.formats import StackedMatrix, stacked
from quire.layers.quantized import matrix as quantized_matrix
from quire.layers.quantized.fp4 import Mxfp4, Nvfp4
from quire.layers.quantized.grouped import Grouped
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.scaled import Fp8, Int8
from quire.layers.weights import Weight, make_room

MADE: dict[str, tuple[QuantizedFormat, float]] = {  # and the error, relative, that it may have
    "fp8": (Fp8(makes=True), 0.03),
    "fp8 blocks": (Fp8(makes=True, block=(128, 128)), 0.03),
    "fp8 groups": (Fp8(makes=True, block=(1, 64)), 0.03),
    "int8": (Int8(makes=True), 0.01),
    "int4": (Grouped(makes=True, group=128, has_zeros=True), 0.11),
    "int4 around the middle": (Grouped(makes=True, group=64), 0.11),
    "8 bits in groups": (Grouped(makes=True, bits=8, group=32, has_zeros=True), 0.01),
    "whole rows": (Grouped(makes=True, bits=8, has_zeros=True), 0.01),
    "mxfp4": (Mxfp4(makes=True), 0.2),
    "nvfp4": (Nvfp4(makes=True), 0.15),
}


def made(kind: QuantizedFormat, numbers: torch.Tensor, device: str = "cpu") -> QuantizedMatrix:
    """In uneven pieces, but where blocks of rows need whole ones."""
    with torch.device("meta"):
        matrix = kind.matrix(*numbers.shape)
    assert isinstance(matrix, QuantizedMatrix)
    make_room(matrix, torch.float32, torch.device(device))
    (weight,) = matrix.weights(Weight("layer", tuple(numbers.shape)), slice(None))
    assert weight.name == "layer.weight" and weight.shape == tuple(numbers.shape)
    for start, stop in ((0, 128), (128, 256), (256, len(numbers))):
        weight.place.rows(start, stop).store(numbers[start:stop])
    assert weight.place.holds(numbers)
    return matrix


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, near = MADE[name]
    numbers = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    matrix = made(kind, numbers)
    dense = matrix.dense()
    assert 0 < (dense - numbers).norm() < near * numbers.norm()
    indices = torch.tensor([299, 0, 131, 131])
    assert torch.equal(matrix.rows(indices), dense[indices])
    x, bias = torch.randn(5, 256), torch.randn(300)
    monkeypatch.setattr(quantized_matrix, "TILE_ON_CPU", 256 * 77)  # several tiles, a shorter last
    torch.testing.assert_close(matrix.multiply(x, bias), F.linear(x, dense, bias))
    gate, up = F.linear(x, dense, bias).chunk(2, dim=-1)
    for activation in Activation:
        found = matrix.gated(x, bias, ReferenceBackend(), activation)
        torch.testing.assert_close(found, activation(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_a_product_on_a_gpu_is_captured(name: str) -> None:
    """Nothing in it waits for the host."""
    matrix = made(MADE[name][0], torch.randn(300, 256), "cuda")
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    right = F.linear(x, matrix.dense().to(x.dtype))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matrix.multiply(x, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = matrix.multiply(x, None)
    graph.replay()
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


def test_zeros_and_extremes_are_made_whole() -> None:
    """Rows of zeros, of one sign, and with a single number."""
    numbers = torch.zeros(300, 256)
    numbers[1] = 3.0
    numbers[2] = -torch.rand(256)
    numbers[3, 7] = 1e-30
    numbers[4, 7] = 1e30
    for kind, near in MADE.values():
        dense = made(kind, numbers).dense()
        assert dense.isfinite().all()
        assert (dense[0] == 0).all()
        if not isinstance(kind, Fp8) or kind.block is None:
            assert (dense[2] - numbers[2]).norm() <= near * numbers[2].norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("block", [(1, 256), (100, 64)])
def test_scales_of_fp8_are_the_best_of_an_octave(block: tuple[int, int], device: str) -> None:
    """Each block by itself, and each scale that there is to try."""
    numbers = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).exp()
    codes, scales = (found.cpu() for found in to_fp8(numbers.to(device), *block))
    height, width = block
    improved = 0
    for i in range(300 // height):
        for j in range(256 // width):
            part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            found = (codes[part].float() * scales[i, j] - numbers[part]).norm()
            largest = numbers[part].abs().max() / FP8_LARGEST
            tried = [largest * factor for factor in OCTAVE]
            errors = [
                ((numbers[part] / each).to(FP8).float() * each - numbers[part]).norm()
                for each in tried
            ]
            torch.testing.assert_close(found, min(errors))
            improved += bool(found < 0.99 * errors[0])
    assert improved > 0


def test_nibbles_pack_and_unpack() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    codes = unpack_nibbles(packed)
    assert codes.shape == (4, 128) and codes[0, :4].tolist() == [0, 0, 1, 0]
    assert torch.equal(pack_nibbles(codes), packed)


def test_every_code_of_fp4_and_every_exponent() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert from_fp4(codes, torch.ones(16)).tolist() == [*E2M1, *(-number for number in E2M1)]
    exponents = torch.arange(255, dtype=torch.uint8)
    assert from_e8m0(exponents).tolist() == [2.0 ** (i - 127) for i in range(255)]


def test_which_matrices_are_one() -> None:
    blocks = Fp8(block=(128, 128))
    with torch.device("meta"):
        assert not isinstance(stacked([blocks] * 3, [256, 128, 64], 128), StackedMatrix)
        assert isinstance(stacked([blocks] * 3, [64, 64, 64], 128), StackedMatrix)
        assert not isinstance(stacked([Fp8()] * 3, [64, 64, 64], 128), StackedMatrix)
        assert isinstance(stacked([Grouped(by_index=True)] * 2, [64, 64], 128), StackedMatrix)
        assert isinstance(stacked([Fp8(), Int8()], [64, 64], 128), StackedMatrix)
