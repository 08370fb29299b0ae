"""Matrices of int8 and of four bits on a CPU: the same numbers, multiplied as they are stored."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.activation import Activation
from quire.kernels.backend import backend_for
from quire.kernels.gguf_product import multiplies_bytes
from quire.layers.quantized.grouped import Grouped
from quire.layers.quantized.matrix import QuantizedFormat, QuantizedMatrix
from quire.layers.quantized.scaled import Int8
from quire.layers.weights import Weight

pytest.importorskip("numba")

CPU = torch.device("cpu")
FORMATS: dict[str, QuantizedFormat] = {
    "int8": Int8(makes=True),
    "int4 by 128": Grouped(makes=True, group=128),
    "int4 by 64, with zeros": Grouped(makes=True, group=64, has_zeros=True),
    "int4 by row": Grouped(makes=True, scale_dtype=torch.float16),
}
every_format = pytest.mark.parametrize("name", list(FORMATS))


def made(name: str, rows: int = 64, columns: int = 256, bits: int = 16) -> QuantizedMatrix:
    matrix = FORMATS[name].matrix(rows, columns)
    assert isinstance(matrix, QuantizedMatrix)
    matrix.activation_bits = bits
    matrix.make_room(torch.float32, CPU)
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    for weight in matrix.weights(Weight("layer", (rows, columns)), slice(None)):
        weight.fill(numbers)
    return matrix


def is_laid_out(matrix: QuantizedMatrix) -> bool:
    before = matrix.weight.clone()
    matrix.lay_out()
    return not torch.equal(matrix.weight, before)


@every_format
def test_another_order_holds_the_same_numbers(name: str) -> None:
    matrix = made(name)
    before = matrix.dense()
    assert is_laid_out(matrix)
    assert torch.equal(matrix.dense(), before)
    chosen = torch.tensor([63, 0, 17, 17])
    assert torch.equal(matrix.rows(chosen), before[chosen])
    matrix.lay_out()  # once is enough
    assert torch.equal(matrix.dense(), before)


@every_format
def test_products_are_those_of_the_reference(name: str) -> None:
    matrix = made(name, columns=640)  # of which kernels take 256 at a time
    matrix.lay_out()
    x, bias = torch.randn(11, 640), torch.randn(64)
    wanted = matrix.multiply_dense(x, bias)
    found = matrix.multiply(x, bias)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 * wanted.abs().max().item())
    for token in range(11):
        assert torch.equal(matrix.multiply(x[token : token + 1], bias), found[token : token + 1])
    backend = backend_for(CPU)
    gated = matrix.gated(x, bias, backend, Activation.SILU)
    wanted = backend.act_and_mul(found, Activation.SILU)
    torch.testing.assert_close(gated, wanted, rtol=1e-6, atol=1e-6)
    halves = matrix.multiply(x.bfloat16(), bias.bfloat16())
    assert halves.dtype == torch.bfloat16


@pytest.mark.skipif(not multiplies_bytes(), reason="this CPU multiplies 16 bits as fast")
@pytest.mark.parametrize("name", ["int8", "int4 by 128"])
def test_activations_may_have_eight_bits(name: str) -> None:
    matrix = made(name, bits=8)
    matrix.lay_out()
    x = torch.randn(11, 256)
    blocks = x.unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = ((blocks / scales).round() * scales).flatten(1)
    wanted = matrix.multiply_dense(codes, None)
    near = 2e-4 * wanted.abs().max().item()
    torch.testing.assert_close(matrix.multiply(x, None), wanted, rtol=0, atol=near)


@pytest.mark.parametrize(("rows", "columns"), [(40, 256), (64, 240)])
def test_sizes_that_blocks_do_not_fit_are_multiplied_as_before(rows: int, columns: int) -> None:
    matrix = made("int8", rows, columns)
    assert not is_laid_out(matrix)
    x = torch.randn(3, columns)
    assert torch.equal(matrix.multiply(x, None), matrix.multiply_dense(x, None))
