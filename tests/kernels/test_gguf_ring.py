"""Where the Gluon kernel of Hopper GPUs finds codes, and what its instructions make of them: all
threads and registers are followed, without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from gguf_codes import stored_rows
from ptx_model import follow
from torch import Tensor

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_tiles import TILE_TYPES, TileType, to_tiles

pytest.importorskip("triton.experimental.gluon")
ring_places = pytest.importorskip("quire.kernels.triton.gguf.ring_places")
ring_instructions = pytest.importorskip("quire.kernels.triton.gguf.ring_instructions")

COLUMNS = 512
BITS = ("half", "g2", "g1", "g0", "f", "k8", "t1", "t0", "pair")  # of a chunk's row and column


@pytest.mark.parametrize("type_", TILE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_threads_find_their_numbers_and_round_them_once(type_: str, dtype: torch.dtype) -> None:
    kind = TILE_TYPES[type_]
    stored = torch.from_numpy(stored_rows(type_, 16, COLUMNS))
    scale = torch.rand(16, 1, 1) + 0.5
    low = torch.rand(16, 1, 1) - 0.5 if kind.has_lows else torch.zeros(16, 1, 1)
    weights = rounded_weights(kind, stored, scale, low, dtype)
    codes = kind.parts(stored.unflatten(1, (-1, TYPES[type_].bytes))).codes.view(16, -1, 4, 32)
    numbers = torch.tensor(kind.table)[codes.int()] if kind.table else codes.int() - kind.zero
    wanted = numbers * scale.double()[..., None] + low.double()[..., None]
    step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(weights.double(), wanted, rtol=step * 1.001, atol=2e-5)


def rounded_weights(
    kind: TileType, stored: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype
) -> Tensor:
    """`[row, tile, chunk, column]`, by the instructions of a GPU."""
    tiles = to_tiles(kind.name, stored)
    codes = words_of_threads(tiles.codes, kind.bits, kind.group)
    if kind.bits == 2:
        codes = chosen(codes, 2, 0)
    above = []
    if kind.upper:
        upper = words_of_threads(tiles.upper, kind.upper, kind.group)
        above = [chosen(upper, kind.upper, kind.bits)[..., 0]] * 2
    pair = [codes[..., 0], codes[..., 1]]
    if kind.table:
        pair = list(follow(ring_instructions.entries(kind.table), pair, (torch.int64,) * 2))
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    added = low - scale * (ring_instructions.IN_BF16.value + kind.zero)
    chunks = []
    for chunk in range(4):
        if kind.bits == 8 or kind.table:
            asm, given = ring_instructions.of_bytes(chunk, name), [*pair, scale, scale]
        else:
            asm = ring_instructions.of_codes(chunk, kind.bits, kind.upper, name)
            given = [*pair, *above, scale, scale, added, added]
        (found,) = follow(asm, given, (torch.int64,))
        both = torch.stack((found & 0xFFFF, found >> 16), -1)
        chunks.append(both.to(torch.uint16).view(dtype).flatten(2))
    return torch.stack(chunks, 2)


def words_of_threads(packed: Tensor, bits: int, group: int) -> Tensor:
    """The word of each number of a chunk, `[row, tile, column / 2, pair]`."""
    words = packed.contiguous().view(torch.int32).long() & 0xFFFF_FFFF
    words = words.view(-1, ring_places.words_of(bits) // 32, 32)
    places = ring_places.row_bits(bits)
    rows = torch.arange(words.shape[1])
    in_tile = sum((rows >> bit & 1) << place for bit, place in enumerate(places))
    in_shared = words[:, in_tile]
    registers = ring_places.register_names(bits, group)
    row, place = torch.zeros(2, 2, 8, 2, 2, 2, 2, 2, dtype=torch.int64)
    for names in (registers, ring_places.LANES.value):
        for name, basis in zip(names, ring_places.bases(names, bits, group), strict=True):
            bit = bit_of_number(name)
            row, place = row + bit * basis[0], place + bit * basis[1]
    found = in_shared[:, row, place]  # tile, half, g, f, k8, t1, t0, pair
    return found.view(-1, 16, 16, 2).transpose(0, 1)


def bit_of_number(name: str) -> Tensor:
    """Of each number of a chunk, by `[half, g, f, k8, t1, t0, pair]`."""
    place = 8 - BITS.index(name)
    return (torch.arange(512) >> place & 1).view(2, 8, 2, 2, 2, 2, 2)


def chosen(words: Tensor, bits: int, shift: int) -> Tensor:
    t, half = (bit_of_number(name).view(16, 1, 16, 2) for name in ("t0", "half"))
    if bits == 2:
        asm = ring_instructions.chosen_pair(shift)
        which = ring_instructions.PAIR_BYTES.value + t * ring_instructions.NEXT_PAIR.value
    else:
        asm = ring_instructions.chosen_bits(shift)
        which = ring_instructions.SINGLE_BYTE.value + t * ring_instructions.NEXT_T.value
        which = which + half * ring_instructions.NEXT_HALF.value
    return follow(asm, [words, which.expand(words.shape)], (torch.int64,))[0]


def test_bytes_are_numbers() -> None:
    word, place = torch.randint(0, 1 << 32, (1, 999)), torch.arange(4)[:, None]
    which = (place + ring_instructions.FLOAT_BYTE.value).expand(4, 999)
    inputs = [word.expand(4, 999), which]
    (bits,) = follow(ring_instructions.BYTE_AS_FLOAT.value, inputs, (torch.int64,))
    assert torch.equal(bits.int().view(torch.float32) - 2.0**23, (word >> 8 * place & 255).float())


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32), (4, 16), (2, 16), (1, 32), (1, 16)])
def test_shapes_name_every_number_once(bits: int, group: int) -> None:
    """What is read as bits and put in the order of rows and columns is where threads have it."""
    shape, axes = ring_places.split_shape(bits), ring_places.axes(bits, group)
    numbers = torch.arange(ring_places.words_of(bits)).view(shape).permute(axes)
    numbers = numbers.reshape(ring_places.joined_shape(bits, group)).expand(2, 8, 2, 2, 2, 2, 2)
    registers = ring_places.register_names(bits, group)
    wanted = torch.zeros_like(numbers)
    for names in (registers, ring_places.LANES.value):
        for name, (row, place) in zip(names, ring_places.bases(names, bits, group), strict=True):
            wanted = wanted + bit_of_number(name) * (row * 32 + place)
    assert torch.equal(numbers, wanted)


@pytest.mark.parametrize(
    ("bits", "group", "most"), [(8, 32, 1), (4, 32, 2), (4, 16, 2), (1, 32, 1)]
)
def test_threads_ask_different_banks(bits: int, group: int, most: int) -> None:
    """So many words of a bank at most, of 32 that a warp asks for at once: where both of a pair are
    words, half a warp."""
    names = ring_places.names_of_bits(bits, group)
    fixed = [name for name in names if name in ring_places.REGISTERS.value]
    if bits == 8:
        fixed[fixed.index("pair")] = "g2"
    words = torch.arange(1 << len(names))
    banks = (words // 4 % 8 ^ words // 32 % min(len(words) // 32, 8)) * 4 + words % 4
    for values in itertools.product((0, 1), repeat=len(fixed)):
        asked = torch.ones_like(words, dtype=torch.bool)
        for name, value in zip(fixed, values, strict=True):
            asked &= words >> names.index(name) & 1 == value
        assert int(torch.bincount(banks[asked]).max()) <= most
