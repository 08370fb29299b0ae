"""Matrices in GGUF's types: what they hold, and what they multiply, against the `gguf` package."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from gguf_codes import SCALES, random_codes
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.activation import Activation
from quire.kernels.backend import backend_for
from quire.kernels.gguf_bits import MOVES
from quire.kernels.gguf_blocks import TYPES, interleave, rows_of
from quire.kernels.gguf_product import multiplies_bytes, reference
from quire.layers.formats import Dense, StackedMatrix
from quire.layers.quantized.gguf import GGUFFormat, GGUFFormats, GGUFMatrix
from quire.layers.weights import Weight

CPU = torch.device("cpu")
SIZE = 512
LARGEST = {16: 127 * 256 + 127, 8: 127}  # of two signed digits of eight bits, and of one
ODD_SIZES = {32: 13 * 32, 256: 3 * 256}  # by a block's size: kernels take some blocks at a time
every_type = pytest.mark.parametrize("type_", list(TYPES))
# With one of each way in which scales and offsets lie, those of activations in eight bits.
all_bits = pytest.mark.parametrize(
    ("type_", "bits"),
    [
        *((type_, 16) for type_ in TYPES),
        *((type_, 8) for type_ in ("Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K") if multiplies_bytes()),
    ],
)


def stored_rows(type_: str, rows: int, size: int = SIZE) -> Tensor:
    """Rows of a matrix in bytes."""
    if type_ in SCALES:
        return torch.from_numpy(random_codes(Type[type_], rows, size))
    numbers = np.random.default_rng(0).standard_normal((rows, size), np.float32) * 0.1
    return torch.from_numpy(gguf.quants.quantize(numbers, Type[type_]).view(np.uint8))


def dequantised(type_: str, stored: Tensor) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), Type[type_]))


def filled(
    type_: str, stored: Tensor, size: int = SIZE, most: int = 1 << 24, bits: int = 16
) -> GGUFMatrix:
    matrix = GGUFFormat(type_).matrix(len(stored), size)
    assert isinstance(matrix, GGUFMatrix)
    matrix.activation_bits = bits
    matrix.make_room(torch.float32, CPU)
    for weight in matrix.weights(Weight("layer", (len(stored), size)), slice(None)):
        for piece in weight.pieces(most):
            piece.fill(stored[piece.part])
    return matrix


def rounded(x: Tensor, bits: int) -> Tensor:
    """What activations become: 32 with a scale."""
    blocks = x.unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST[bits]
    return ((blocks / scales).round() * scales).flatten(-2)


@every_type
def test_a_matrix_holds_what_the_file_has(type_: str) -> None:
    stored = stored_rows(type_, 40)
    in_pieces = filled(type_, stored, most=7 * stored.shape[1])
    wanted = dequantised(type_, stored)
    assert torch.equal(in_pieces.dense(), wanted)
    chosen = torch.tensor([39, 0, 16, 17, 0])
    assert torch.equal(in_pieces.rows(chosen), wanted[chosen])
    (weight,) = in_pieces.weights(Weight("layer", (40, SIZE)), slice(None))
    assert weight.place.holds(stored)
    assert not weight.place.rows(3, 9).holds(stored[4:10])
    assert in_pieces.weight.nbytes == 48 * stored.shape[1]  # rows are in sixteens


@all_bits
@pytest.mark.parametrize("rows", [32, 40])
def test_products_round_activations_and_nothing_else(type_: str, bits: int, rows: int) -> None:
    torch.manual_seed(0)
    size = ODD_SIZES.get(TYPES[type_].values, SIZE)
    stored = stored_rows(type_, rows, size)
    matrix, dense = filled(type_, stored, size, bits=bits), dequantised(type_, stored)
    x, bias = torch.randn(11, size), torch.randn(rows)
    x[2, :64] *= 1000
    x[3, 32:96] = 0
    found = matrix.multiply(x, bias)
    near = {"rtol": 1e-5, "atol": 1e-5 * float((x.abs() @ dense.abs().t()).max())}
    codes = rounded(x, bits).nan_to_num() if TYPES[type_].has_codes else x
    torch.testing.assert_close(found, F.linear(codes, dense, bias), **near)
    step = x.unflatten(-1, (-1, 32)).abs().amax(-1) / LARGEST[bits]
    most = step @ dense.unflatten(-1, (-1, 32)).abs().sum(-1).t() / 2
    exact = reference(matrix.kind, matrix.weight, rows, x, bias)
    assert ((found - exact).abs() <= most * 1.001 + near["atol"]).all()
    torch.testing.assert_close(exact, F.linear(x, dense, bias))


@all_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(type_: str, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size = ODD_SIZES.get(TYPES[type_].values, SIZE)
    matrix = filled(type_, stored_rows(type_, 64, size), size, bits=bits)
    backend = backend_for(CPU)
    x = torch.randn(300, size).to(dtype)  # more than a kernel takes at once
    together = matrix.multiply(x, None)
    gated = matrix.gated(x, None, backend, Activation.SILU)
    for start, stop in [(0, 1), (299, 300), (20, 23), (5, 12), (250, 283), (15, 46), (3, 9)]:
        assert torch.equal(matrix.multiply(x[start:stop], None), together[start:stop])
        alone = matrix.gated(x[start:stop], None, backend, Activation.SILU)
        assert torch.equal(alone, gated[start:stop])


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_K"])
def test_long_rows_are_multiplied_with_fewer_tokens_at_a_time(type_: str) -> None:
    torch.manual_seed(0)
    size = 6144
    matrix = filled(type_, stored_rows(type_, 48, size), size)
    x = torch.randn(263, size)
    together = matrix.multiply(x, None)
    for start, stop in [(0, 1), (20, 61), (40, 81), (240, 263)]:
        assert torch.equal(matrix.multiply(x[start:stop], None), together[start:stop])
    exact = F.linear(x, dequantised(type_, stored_rows(type_, 48, size)))
    torch.testing.assert_close(together, exact, atol=0.02, rtol=1e-3)


PRODUCT = """
import sys, torch
from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_product import product_with
matrices, x = torch.load(sys.argv[1])
products = [product_with(TYPES[type_], weights, 32) for type_, weights in matrices.items()]
assert all(product.gates for product in products), "there is no kernel"
torch.save([product(x, None) for product in products], sys.argv[1])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are features of x86")
def test_a_machine_without_avx512_has_the_same_bits(tmp_path: Path) -> None:
    """What such a machine would run is compiled for it in a process of its own."""
    torch.manual_seed(0)
    matrices = {type_: filled(type_, stored_rows(type_, 32)) for type_ in ("Q4_0", "IQ4_NL")}
    x = torch.randn(15, SIZE)
    weights = {type_: matrix.weight for type_, matrix in matrices.items()}
    torch.save((weights, x), tmp_path / "tensors")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt",
    }
    arguments = [sys.executable, "-c", PRODUCT, str(tmp_path / "tensors")]
    subprocess.run(arguments, env=environment, check=True)
    for found, matrix in zip(torch.load(tmp_path / "tensors"), matrices.values(), strict=True):
        assert torch.equal(found, matrix.multiply(x, None))


@pytest.mark.parametrize("type_", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("rows", [64, 48])
@pytest.mark.parametrize("activation", list(Activation))
def test_gates(type_: str, rows: int, activation: Activation) -> None:
    torch.manual_seed(0)
    matrix = filled(type_, stored_rows(type_, rows))
    x, bias = torch.randn(5, SIZE) * 5, torch.randn(rows)
    gate, up = matrix.multiply(x, bias).chunk(2, dim=-1)
    found = matrix.gated(x, bias, backend_for(CPU), activation)
    torch.testing.assert_close(found, activation(gate) * up, rtol=1e-5, atol=1e-5)


def test_numbers_in_16_bits_and_no_tokens() -> None:
    matrix = filled("Q4_0", stored_rows("Q4_0", 32))
    x = torch.randn(3, SIZE).half()
    assert torch.equal(matrix.multiply(x, None), matrix.multiply(x.float(), None).half())
    assert matrix.multiply(torch.empty(0, SIZE), None).shape == (0, 32)
    assert matrix.rows(torch.tensor([], dtype=torch.int64)).shape == (0, SIZE)


@pytest.mark.parametrize(("type_", "start"), [(t, at) for t, ats in SCALES.items() for at in ats])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_that_are_not_numbers_are_refused(type_: str, start: int, bad: float) -> None:
    stored = stored_rows(type_, 20)
    last = stored[17, -TYPES[type_].bytes :]
    last[start : start + 2] = torch.tensor([bad]).half().view(torch.uint8)
    with pytest.raises(ModelError, match=r"^layer has scales that are no finite numbers"):
        filled(type_, stored)


@pytest.mark.parametrize("bits", [16, 8] if multiplies_bytes() else [16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_none_afterwards(bad: float, bits: int) -> None:
    matrix = filled("Q4_1", stored_rows("Q4_1", 32), bits=bits)
    x = torch.randn(11, SIZE)
    x[[1, 9], 100] = bad
    found = matrix.multiply(x, None)
    is_number = torch.tensor([row not in (1, 9) for row in range(11)])
    assert found[~is_number].isnan().all() and found[is_number].isfinite().all()


def test_activations_whose_scale_has_no_inverse_are_near_their_largest() -> None:
    rows = torch.full((16, SIZE // 32, 34), 100, dtype=torch.uint8)
    rows[:, :, :2] = torch.tensor([1024.0]).half().view(torch.uint8)
    matrix = filled("Q8_0", rows.flatten(1))
    x = torch.full((9, SIZE), 1e-38) * torch.where(torch.arange(9) % 2 == 0, 1, -1)[:, None]
    wanted = (x.double() * 1024 * 100).sum(-1, keepdim=True).expand(9, 16)
    torch.testing.assert_close(matrix.multiply(x, None).double(), wanted, rtol=0.02, atol=0)


@pytest.mark.parametrize("type_", ["Q5_1", "Q2_K", *MOVES])
def test_rows_are_interleaved_wherever_they_begin(type_: str) -> None:
    kind, stored = TYPES[type_], stored_rows(type_, 50).numpy()
    memory = np.zeros((4, SIZE // kind.values, 16 * kind.bytes), np.uint8)
    for start, stop in [(0, 3), (3, 35), (35, 50)]:
        interleave(kind, stored[start:stop], memory, start + 5)
    assert np.array_equal(rows_of(kind, memory, np.arange(5, 55)), stored)


@pytest.mark.parametrize("type_", ["Q4_0", "Q3_K"])
def test_columns_are_dealt_out_in_whole_blocks(type_: str) -> None:
    kind, stored = TYPES[type_], stored_rows(type_, 32)
    matrix = GGUFMatrix(kind, 32, SIZE // 2)
    matrix.make_room(torch.float32, CPU)
    whole = Weight("layers.0.o", (32, SIZE), part=(slice(None), slice(SIZE // 2, SIZE)))
    (weight,) = matrix.weights(whole, slice(None))
    weight.fill(stored[weight.part])
    assert torch.equal(matrix.dense(), dequantised(type_, stored)[:, SIZE // 2 :])
    cut = Weight("layers.0.o", (32, SIZE), part=(slice(None), slice(16, 272)))
    message = rf"layers\.0\.o is {type_}, in blocks of {kind.values} values.*16 to 272"
    with pytest.raises(ModelError, match=message):
        list(matrix.weights(cut, slice(None)))


def test_formats_are_found_by_the_name_of_the_layer_or_of_what_fuses_it() -> None:
    formats = GGUFFormats.from_types({"a.q": "Q4_K", "a.qkv": "Q6_K", "a.o_proj": "Q4_K"})
    assert formats.of("a.q", "a.qkv") == GGUFFormat("Q4_K")
    assert formats.of("a.v", "a.qkv") == GGUFFormat("Q6_K")
    assert formats.of("a.o_proj") == GGUFFormat("Q4_K")
    assert formats.of("b") == Dense()
    again = GGUFFormats.from_types({"a.o_proj": "Q4_K", "a.qkv": "Q6_K", "a.q": "Q4_K"})
    assert formats == again and hash(formats) == hash(again)


@pytest.mark.parametrize("last", [16, 20])
def test_matrices_of_two_types_below_each_other(last: int) -> None:
    parts = [filled("Q4_0", stored_rows("Q4_0", 32)), filled("Q8_0", stored_rows("Q8_0", last))]
    both = StackedMatrix(parts)
    bias = torch.randn(32 + last)
    for tokens in (1, 5):
        x = torch.randn(tokens, SIZE)
        alone = [
            part.multiply(x, added)
            for part, added in zip(parts, bias.split((32, last)), strict=True)
        ]
        assert torch.equal(both.multiply(x, bias), torch.cat(alone, dim=1))
