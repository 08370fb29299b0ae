"""Products with GGUF's types in tiles, held against float64 of the same numbers."""

from __future__ import annotations

import gguf
import pytest
import torch
from exact_products import check, exact
from gguf import GGMLQuantizationType as Type
from gguf_codes import stored_rows
from ptx_model import follow
from torch import Tensor

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_tiles import TILE_TYPES, GGUFTiles, numbers_of_tiles, to_tiles


def matrix(type_: str, rows: int, columns: int, device: str = "cpu") -> tuple[GGUFTiles, Tensor]:
    """In tiles, and its numbers."""
    stored = stored_rows(type_, rows, columns)
    numbers = torch.from_numpy(gguf.dequantize(stored, Type[type_]))
    return to_tiles(type_, torch.from_numpy(stored).to(device)), numbers


@pytest.mark.parametrize("type_", TILE_TYPES)
def test_tiles_hold_the_same_numbers(type_: str) -> None:
    columns = 768 if TYPES[type_].values == 256 else 96
    tiles, numbers = matrix(type_, 21, columns)
    memory = torch.full((tiles.kind.num_bytes(*numbers.shape),), 7, dtype=torch.uint8)
    for each in (tiles, tiles.moved_to(memory)):
        torch.testing.assert_close(numbers_of_tiles(each), numbers, rtol=1e-6, atol=1e-9)


def test_all_types_of_codes_have_tiles() -> None:
    assert set(TILE_TYPES) == {name for name, kind in TYPES.items() if kind.has_codes}


def columns_of(type_: str) -> int:
    """Odd multiples of a block, that fill no tile where they need not."""
    return 768 if TYPES[type_].values == 256 else 160


@pytest.mark.parametrize("type_", TILE_TYPES)
def test_rows_are_found(triton_device: str, type_: str) -> None:
    from quire.kernels.triton.gguf.rows import dequantise

    tiles, numbers = matrix(type_, 21, columns_of(type_), triton_device)
    rows = torch.tensor([20, 3, 3, 8, 0])
    found = dequantise(tiles, torch.float32, rows.to(triton_device)).cpu()
    torch.testing.assert_close(found, numbers[rows], rtol=1e-6, atol=1e-9)
    found = dequantise(tiles, torch.bfloat16).cpu()
    torch.testing.assert_close(found.float(), numbers, rtol=2**-7, atol=1e-9)


@pytest.mark.parametrize("type_", TILE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_exact", [True, False])
def test_instructions_unpack_codes(type_: str, dtype: torch.dtype, is_exact: bool) -> None:
    from quire.kernels.triton.gguf.instructions import excess, unpacking

    kind = TILE_TYPES[type_]
    count = 1 << kind.bits + kind.upper
    codes = torch.randint(0, count, (200, 4, 4))  # of words, of which each has four chunks
    lower = (codes % (1 << kind.bits) << torch.arange(4) * kind.bits).sum(2)
    registers = 4 * kind.bits // 8
    words = lower.view(200, registers, -1)
    inputs = list((words << torch.arange(words.shape[2]) * 4 * kind.bits).sum(2).unbind(1))
    if kind.upper:
        upper = (codes >> kind.bits << torch.arange(4) * kind.upper).sum(2)
        if kind.upper == 1:  # of 16 bits, of which the others may be any
            upper += torch.randint(0, 1 << 12, upper.shape) << 4
            inputs += list((upper.view(200, 2, 2) << torch.arange(0, 32, 16)).sum(2).unbind(1))
        else:
            inputs.append((upper << torch.arange(0, 32, 8)).sum(1))
    asm, constraints = unpacking(kind, dtype, is_exact)
    assert constraints.count("r") == 8 + len(inputs)
    found = torch.stack(follow(asm, inputs, (torch.int64,) * 8), 1).view(200, 4, 2)
    numbers = torch.stack((found & 0xFFFF, found >> 16), 3).to(torch.uint16).view(dtype)
    table = torch.tensor(kind.table) if kind.table else torch.arange(count) - kind.zero
    wanted = table[codes] + (0 if is_exact else excess(kind, dtype))
    assert torch.equal(numbers.flatten(2).transpose(1, 2).double(), wanted.double())


def check_linear(
    device: str,
    type_: str,
    rows: int,
    features: int,
    columns: int,
    dtype: torch.dtype = torch.float16,
) -> None:
    from quire.kernels.triton.gguf.product import gguf_linear

    tiles, numbers = matrix(type_, features, columns, device)
    torch.manual_seed(rows)
    x = (torch.randn(rows, columns) / numbers.std() / columns**0.5).to(dtype)
    bias = torch.randn(features).to(dtype) if rows % 2 else None
    on_device = None if bias is None else bias.to(device)
    wide = torch.full((rows, features + 7), torch.nan, dtype=dtype, device=device)
    out = gguf_linear(x.to(device), tiles, on_device, wide[:, 3 : features + 3])
    check(out, exact(x, numbers, bias), slack=4)
    assert wide[:, :3].isnan().all() and wide[:, features + 3 :].isnan().all()


@pytest.mark.parametrize("type_", TILE_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_products(triton_device: str, type_: str, rows: int) -> None:
    check_linear(triton_device, type_, rows, 21, columns_of(type_))


@pytest.mark.parametrize("rows", [2, 70])
def test_columns_that_programs_share(triton_device: str, rows: int) -> None:
    """And steps of which the last is not full."""
    check_linear(triton_device, "Q5_K", rows, 150, 1280)


@pytest.mark.parametrize("rows", [0, 20])
def test_the_matrix_is_dequantised_for_more(
    triton_device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton.gguf import product

    monkeypatch.setattr(product, "MANY", 18)
    check_linear(triton_device, "Q4_K", rows, 21, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("type_", TILE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 17, 64, 96, 200, 300, 570, 700])
def test_the_kernels_of_a_gpu(rows: int, dtype: torch.dtype, type_: str) -> None:
    """Features that fill no program, columns no step nor tile; tiles of x of all heights, shared by
    programs on a Hopper GPU."""
    columns = 2816 if TYPES[type_].values == 256 else 2848
    check_linear("cuda", type_, rows, 1050, columns, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (17000, 1024), (21, 512)], ids=str)
@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 16, 40, 128, 256])
def test_large_matrices(rows: int, type_: str, shape: tuple[int, int]) -> None:
    """Programs that have all columns, that share them, or some of each; and a matrix of fewer rows
    than one has."""
    check_linear("cuda", type_, rows, *shape, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_x_may_be_apart(first: int) -> None:
    """Also where hardware would not copy from."""
    from quire.kernels.triton.gguf.product import gguf_linear

    tiles, _ = matrix("Q6_K", 300, 512, "cuda")
    wide = torch.randn(40, 528, device="cuda").bfloat16()
    x = wide[:, first : first + 512]
    assert torch.equal(gguf_linear(x, tiles, None), gguf_linear(x.contiguous(), tiles, None))
