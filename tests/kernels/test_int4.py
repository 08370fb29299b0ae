"""Products with four-bit matrices in tiles, held against float64 of the same numbers."""

from __future__ import annotations

import pytest
import torch
from activations import EXACT
from exact_products import check, exact
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.dequantise import from_codes, pack_nibbles, spread, unpack_nibbles
from quire.kernels.int4_tiles import (
    Int4Tiles,
    by_tiles,
    has_tiles,
    rows_by_tiles,
    rows_of_tiles,
    to_tiles,
)
from quire.kernels.quantise import SHRUNK, to_groups

KINDS = [(32, True), (64, False), (128, False), (128, True), (384, True)]  # group, has zeros


def matrix(
    features: int,
    columns: int,
    group: int,
    has_zeros: bool,
    dtype: torch.dtype,
    device: str,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Int4Tiles, Tensor]:
    """A matrix in tiles, and its numbers as they are multiplied."""
    torch.manual_seed(features + columns + group)
    codes = torch.randint(0, 16, (features, columns), dtype=torch.uint8)
    shape = (features, columns // group)
    scales = (torch.rand(shape) + 0.5).div(4 * columns**0.5).to(scale_dtype or dtype)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if has_zeros else None
    wide_zeros = None if zeros is None else spread(zeros, group, columns)
    numbers = from_codes(codes, spread(scales, group, columns), wide_zeros, middle=8).to(dtype)
    tiles = Int4Tiles(
        to_tiles(pack_nibbles(codes)).view(torch.int16).to(device),
        by_tiles(scales).to(device),
        None if zeros is None else by_tiles(zeros).to(device),
        group,
    )
    return tiles, numbers


def check_linear(
    device: str,
    rows: int,
    tiles: Int4Tiles,
    numbers: Tensor,
    has_bias: bool = False,
    activation: Activation | None = None,
) -> None:
    from quire.kernels.triton.int4.product import int4_linear

    features, columns = numbers.shape
    x = torch.randn(rows, columns).to(numbers.dtype)
    bias = torch.randn(features).to(numbers.dtype) if has_bias else None
    wanted = exact(x, numbers, bias)
    if activation is not None:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = EXACT[activation](gate) * up
    on_device = None if bias is None else bias.to(device)
    out = int4_linear(x.to(device), tiles, on_device, activation)
    check(out, wanted, slack=16 if activation is not None else 4)


@pytest.mark.parametrize("shape", [(16, 128), (48, 384)], ids=str)
def test_tiles_hold_all_codes(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    rows = torch.randperm(shape[0])[: shape[0] - 3]
    tiles = to_tiles(pack_nibbles(codes))
    assert tiles.shape == (shape[0], shape[1] // 2)
    assert torch.equal(rows_of_tiles(tiles, rows), codes[rows])
    scales = torch.rand(shape[0], 7)
    assert torch.equal(rows_by_tiles(by_tiles(scales), rows), scales[rows])


def test_what_has_tiles() -> None:
    assert has_tiles(16, 128, 32) and has_tiles(48, 384, 384)
    assert not has_tiles(8, 128, 128)
    assert not has_tiles(16, 192, 64)
    assert not has_tiles(16, 128, 16)


@pytest.mark.parametrize("group, has_zeros", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_rows(triton_device, rows, group, has_zeros):
    tiles, numbers = matrix(64, 384, group, has_zeros, torch.float16, triton_device)
    check_linear(triton_device, rows, tiles, numbers, has_bias=rows == 3)


@pytest.mark.parametrize("group, has_zeros", [(128, False), (384, True)])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_by_digits(triton_device, rows, group, has_zeros):
    """Steps of fewer tiles than there are, the last of them not full, and numbers far apart."""
    from quire.kernels.triton.int4.few_digits import Shape, few_rows

    tiles, numbers = matrix(32, 1152, group, has_zeros, torch.bfloat16, triton_device)
    x = torch.randn(rows, 1152)
    x[:, 5] *= 100
    x[:, 256:384] *= 1e-20
    x[0, 512:640] = 0
    x = x.to(torch.bfloat16)
    fast = triton_device == "cuda"
    out = few_rows(x.to(triton_device), tiles, None, None, fast, Shape(4, 4, 2))
    check(out, exact(x, numbers, None), slack=4)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, where kernels are interpreted
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_digits_of_what_is_not_finite(triton_device, value):
    """It is in the results of its own row alone."""
    from quire.kernels.triton.int4.few_digits import few_rows

    tiles, numbers = matrix(16, 256, 128, False, torch.float16, triton_device)
    x = torch.randn(2, 256).half()
    wanted = exact(x, numbers, None)
    x[1, 200] = value
    out = few_rows(x.to(triton_device), tiles, None, None, triton_device == "cuda").cpu()
    check(out[:1], wanted[:1], slack=4)
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [1, 70])
def test_gated(triton_device, rows, activation):
    tiles, numbers = matrix(96, 1152, 128, True, torch.float16, triton_device)
    check_linear(triton_device, rows, tiles, numbers, rows == 1, activation)


@pytest.mark.parametrize("group, has_zeros", KINDS)
def test_many_rows(triton_device, group, has_zeros):
    tiles, numbers = matrix(80, 384, group, has_zeros, torch.float16, triton_device)
    check_linear(triton_device, 150, tiles, numbers, has_bias=has_zeros)


@pytest.mark.parametrize("group, has_zeros", KINDS)
def test_the_matrix_is_dequantised_for_more(triton_device, group, has_zeros, monkeypatch):
    from quire.kernels.triton.int4 import product

    monkeypatch.setattr(product, "MANY", 100)
    tiles, numbers = matrix(
        80, 640 if group == 128 else 384, group, has_zeros, torch.float16, triton_device
    )
    check_linear(triton_device, 101, tiles, numbers, has_bias=has_zeros)
    assert torch.equal(product.dequantise(tiles, torch.float16, tiles.words.is_cuda).cpu(), numbers)


def test_scales_of_another_type(triton_device):
    tiles, numbers = matrix(64, 256, 64, True, torch.float16, triton_device, torch.float32)
    for rows in (2, 70):
        check_linear(triton_device, rows, tiles, numbers)


def test_rows_that_are_part_of_something_wider(triton_device):
    from quire.kernels.triton.int4.product import int4_linear

    tiles, numbers = matrix(32, 256, 128, False, torch.float16, triton_device)
    for rows in (2, 70):
        wide = torch.full((rows, 300), torch.nan, dtype=torch.float16, device=triton_device)
        wide[:, 8:264] = torch.randn(rows, 256)
        part = wide[:, 8:264]
        check(int4_linear(part, tiles, None), exact(part.cpu(), numbers, None), slack=4)


def test_no_rows(triton_device):
    tiles, numbers = matrix(32, 256, 128, False, torch.float16, triton_device)
    check_linear(triton_device, 0, tiles, numbers)
    check_linear(triton_device, 0, tiles, numbers, activation=Activation.SILU)


@pytest.mark.gpu
@pytest.mark.parametrize("group, has_zeros", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 17, 64, 90, 150, 190, 200, 300, 700, 5000])
def test_the_kernels_of_a_gpu(rows, dtype, group, has_zeros):
    """Of each there is one for so many rows; features that fill no program, and columns no step."""
    columns = 1152
    tiles, numbers = matrix(1040, columns, group, has_zeros, dtype, "cuda")
    check_linear("cuda", rows, tiles, numbers, has_bias=has_zeros)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [1, 2, 40, 300])
def test_gated_by_the_kernels_of_a_gpu(rows, activation):
    tiles, numbers = matrix(2 * 6144, 2048, 128, True, torch.bfloat16, "cuda")
    check_linear("cuda", rows, tiles, numbers, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288)], ids=str)
@pytest.mark.parametrize("rows", [20, 90, 190, 256, 350, 600])
def test_columns_that_programs_share(rows, shape):
    tiles, numbers = matrix(*shape, 128, False, torch.bfloat16, "cuda")
    check_linear("cuda", rows, tiles, numbers, has_bias=True)


@pytest.mark.parametrize(
    "rows, of_large, of_small",
    [
        (64, (64, 0), (64, 0)),
        (65, (64, 32), (64, 32)),
        (96, (64, 32), (64, 32)),
        (97, (128, 0), (128, 0)),
        (128, (128, 0), (128, 0)),
        (129, (128, 32), (128, 32)),
        (160, (128, 32), (128, 32)),
        (161, (128, 64), (128, 0)),
        (192, (128, 64), (128, 0)),
        (193, (256, 0), (128, 0)),
        (256, (256, 0), (128, 0)),
        (257, (128, 32), (128, 32)),
        (321, (128, 64), (128, 64)),
        (384, (128, 64), (128, 64)),
        (385, (256, 0), (256, 0)),
    ],
)
def test_rows_of_a_tile_on_hopper(rows, of_large, of_small):
    """All of a step, if a tile may have so many; else those that leave the last one fullest."""
    many = pytest.importorskip("quire.kernels.triton.hopper_products.many")
    from quire.kernels.triton.int4.hopper_many import UNPACKING

    assert many.heights(rows, many.LARGE, UNPACKING) == of_large
    assert many.heights(rows, many.LARGE - 1, UNPACKING) == of_small


@pytest.mark.parametrize("group", [32, 128])
def test_groups_are_fitted_as_plainly(triton_device, group):
    """A group of zeros, and some with a number far from the others. Sums in another order may make
    another scale the best, which then is as good."""
    from quire.kernels.triton.int4.fit import fit_to_groups, fits

    numbers = torch.randn(40, 384, generator=torch.Generator().manual_seed(group))
    numbers[3] = 0
    numbers[5, ::40] *= 30
    assert fits(384, group)

    def errors(codes: Tensor, scales: Tensor) -> Tensor:
        found = from_codes(unpack_nibbles(codes.cpu()), spread(scales.cpu(), group, 384), None, 8)
        counts = numbers.square().unflatten(1, (-1, group))
        counts = counts + counts.mean(-1, keepdim=True)
        return ((found - numbers).square().unflatten(1, (-1, group)) * counts).sum(-1)

    fitted = fit_to_groups(numbers.to(triton_device), group, torch.float16, SHRUNK)
    plain = to_groups(numbers, 4, group, False, torch.float16)
    torch.testing.assert_close(errors(*fitted), errors(*plain), rtol=1e-4, atol=1e-6)


def test_groups_that_are_not_fitted():
    from quire.kernels.triton.int4.fit import fits

    assert not fits(384, 96) and not fits(100, 64) and not fits(8192, 4096)


@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_are_added(triton_device, has_bias):
    """Tiles 2 to 5 of a product: 150 rows make two of 128 each, and 300 features three."""
    from quire.kernels.triton.hopper_products.combine import combine

    features, height, splits = 128, 128, 3
    parts = torch.randn(4, splits, features, height)
    bias = torch.randn(300).half() if has_bias else None
    out = torch.full((150, 300), 7.0, dtype=torch.float16, device=triton_device)
    on_device = None if bias is None else bias.to(triton_device)
    combine(parts.flatten(0, 1).to(triton_device), splits, 2, 2, on_device, out)
    wanted = torch.full((256, 384), 7.0)
    for tile, sums in enumerate(parts.sum(1), start=2):
        rows, columns = slice(tile % 2 * 128, None), slice(tile // 2 * 128, tile // 2 * 128 + 128)
        wanted[rows, columns][:128] = sums.T
    wanted = wanted[:150, :300]
    if bias is not None:
        wanted[:, 128:] += bias.float()[128:]
    torch.testing.assert_close(out.cpu().float(), wanted, atol=1e-2, rtol=1e-2)
