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

from quire.kernels import gguf_tiles
from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_tiles import TILE_TYPES, GGUFTiles, TileType, numbers_of_tiles, to_tiles


def matrix(type_: str, rows: int, columns: int, device: str = "cpu") -> tuple[GGUFTiles, Tensor]:
    """In tiles, and its numbers."""
    stored = stored_rows(type_, rows, columns)
    numbers = torch.from_numpy(gguf.dequantize(stored, Type[type_]))
    return to_tiles(type_, torch.from_numpy(stored).to(device)), numbers


@pytest.mark.parametrize("type_", TILE_TYPES)
def test_tiles_hold_the_same_numbers(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = 768 if TYPES[type_].values == 256 else 96
    monkeypatch.setattr(gguf_tiles, "_AT_ONCE", 32 * columns)  # rows in two pieces
    tiles, numbers = matrix(type_, 37, columns)
    torch.testing.assert_close(numbers_of_tiles(tiles), numbers, rtol=1e-6, atol=1e-9)
    parts = {part.data_ptr(): part.nbytes for part in tiles[3:]}
    assert sum(parts.values()) == tiles.kind.num_bytes(*numbers.shape)


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


def random_codes_of(kind: TileType) -> tuple[Tensor, Tensor, Tensor]:
    """Of 200 times four words, their codes `[200, 4, 4]`; and registers of their lower bits, and
    of the upper ones, a word each."""
    codes = torch.randint(0, 1 << kind.bits + kind.upper, (200, 4, 4))
    lower = (codes % (1 << kind.bits) << torch.arange(4) * kind.bits).sum(2)
    words = lower.view(200, 4 * kind.bits // 8, -1)
    registers = (words << torch.arange(words.shape[2]) * 4 * kind.bits).sum(2)
    return codes, registers, (codes >> kind.bits << torch.arange(4) * kind.upper).sum(2)


@pytest.mark.parametrize("type_", TILE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_exact", [True, False])
def test_instructions_unpack_codes(type_: str, dtype: torch.dtype, is_exact: bool) -> None:
    from quire.kernels.triton.gguf.instructions import excess, unpacking

    kind = TILE_TYPES[type_]
    count = 1 << kind.bits + kind.upper
    codes, registers, upper = random_codes_of(kind)
    inputs = list(registers.unbind(1))
    if kind.upper == 1:  # of 16 bits, of which the others may be any
        upper += torch.randint(0, 1 << 12, upper.shape) << 4
        inputs += list((upper.view(200, 2, 2) << torch.arange(0, 32, 16)).sum(2).unbind(1))
    elif kind.upper:
        inputs.append((upper << torch.arange(0, 32, 8)).sum(1))
    asm, constraints = unpacking(kind, dtype, is_exact)
    assert constraints.count("r") == 8 + len(inputs)
    found = torch.stack(follow(asm, inputs, (torch.int64,) * 8), 1).view(200, 4, 2)
    numbers = torch.stack((found & 0xFFFF, found >> 16), 3).to(torch.uint16).view(dtype)
    table = torch.tensor(kind.table) if kind.table else torch.arange(count) - kind.zero
    wanted = table[codes] + (0 if is_exact else excess(kind, dtype))
    assert torch.equal(numbers.flatten(2).transpose(1, 2).double(), wanted.double())


def columns_in_bytes(order: int, found: Tensor) -> Tensor:
    """Of four registers of bytes, `[…, register, byte]`, a chunk's for each column (k8, pair),
    `[…, 4, 4]`."""
    from quire.kernels.triton.gguf.code_bytes import PAIRS

    if order == PAIRS.value:  # k8, odd, pair, later
        found = found.unflatten(2, (2, 2)).unflatten(1, (2, 2))
        return found.permute(0, 1, 3, 4, 2).reshape(-1, 4, 4)
    return found


def bytes_of(registers: Tensor) -> Tensor:
    """Signed ones, in a new dimension."""
    return (registers[..., None] >> torch.arange(0, 32, 8) & 255).to(torch.uint8).view(torch.int8)


IN_BYTES = [name for name, kind in TILE_TYPES.items() if kind.group == 32 and not kind.upper]


@pytest.mark.parametrize("type_", IN_BYTES)
def test_instructions_make_bytes_of_codes(type_: str) -> None:
    from quire.kernels.triton.gguf import code_bytes

    kind = TILE_TYPES[type_]
    codes, registers, _ = random_codes_of(kind)
    asm, constraints = code_bytes.byte_instructions(kind)
    inputs = list(registers.unbind(1))
    assert constraints.count("r") == 4 + len(inputs)
    found = torch.stack(follow(asm, inputs, (torch.int64,) * 4), 1)
    numbers = columns_in_bytes(code_bytes.order_of(kind), bytes_of(found))
    table = torch.tensor(kind.table) if kind.table else torch.arange(256) - kind.zero
    assert torch.equal(numbers.long(), table[codes] * code_bytes.unit(kind))


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize("is_upper", [True, False])
@pytest.mark.parametrize("chunk", range(4))
def test_instructions_make_bytes_of_digits(order: int, is_upper: bool, chunk: int) -> None:
    """In the places of the thread's chunk its digit, in others zeros."""
    from quire.kernels.triton.gguf import digits

    numbers = torch.randint(-(2**14), 2**14, (200, 4))
    bits = (numbers + 128 * is_upper + 1.5 * 2**23).float().view(torch.int32)
    inputs = list(bits.unbind(1))
    for selector in digits.selectors.fn(chunk, 1 - is_upper, order):
        inputs += [torch.full((200,), selector)] * 4
    assert digits.CONSTRAINTS.value[order].count("r") == 4 + len(inputs)
    found = torch.stack(follow(digits.ASM.value[order], inputs, (torch.int64,) * 4), 1)
    low = numbers.to(torch.int8).long()
    wanted = torch.zeros(200, 4, 4, dtype=torch.int64)
    wanted[:, :, chunk] = (numbers - low) // 256 if is_upper else low
    assert torch.equal(columns_in_bytes(order, bytes_of(found)).long(), wanted)


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
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 40])
def test_products(triton_device: str, type_: str, rows: int) -> None:
    check_linear(triton_device, type_, rows, 21, columns_of(type_))


@pytest.mark.parametrize("rows", [2, 70])
def test_columns_that_programs_share(triton_device: str, rows: int) -> None:
    """And steps of which the last is not full."""
    check_linear(triton_device, "Q5_K", rows, 150, 1280)


@pytest.mark.parametrize("type_", ["Q4_K", "IQ4_XS", "Q8_0"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_few_rows_by_digits(triton_device: str, type_: str, ahead: int) -> None:
    """Turns of fewer tiles than there are, the last of them not full, and numbers far apart."""
    from quire.kernels.triton.gguf.few_digits import Shape, few_rows

    columns = 1280 if TYPES[type_].values == 256 else 1184
    tiles, numbers = matrix(type_, 19, columns, triton_device)
    x = torch.randn(2, columns)
    x[:, 5] *= 100
    x[:, 256:384] *= 1e-20
    x[0, 512:640] = 0
    x = (x / numbers.std() / columns**0.5).to(torch.bfloat16)
    out = torch.empty(2, 19, dtype=torch.bfloat16, device=triton_device)
    few_rows(x.to(triton_device), tiles, None, out, triton_device == "cuda", Shape(4, ahead))
    check(out, exact(x, numbers, None), slack=4)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, where kernels are interpreted
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0"])
def test_digits_of_what_is_not_finite(triton_device: str, type_: str, value: float) -> None:
    """It is in the results of its own row alone."""
    from quire.kernels.triton.gguf.few_digits import few_rows

    tiles, numbers = matrix(type_, 16, 512, triton_device)
    x = (torch.randn(2, 512) / numbers.std() / 512**0.5).half()
    wanted = exact(x, numbers, None)
    x[1, 200] = value
    out = torch.empty(2, 16, dtype=torch.float16, device=triton_device)
    few_rows(x.to(triton_device), tiles, None, out, triton_device == "cuda")
    check(out[:1], wanted[:1], slack=4)
    assert not out[1].isfinite().any()


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
