"""Where a thread of tensor cores finds its codes of a tile in shared memory.

A tile's codes lie as `kernels/gguf_tiles.py` says, here in words of 32 bits. Which word a thread
reads is a matter of bits alone: each bit of a word's number is one of those that name a number of a
left factor, 16 rows by 32 columns (a chunk):

    row     half * 8 + g        column  f * 16 + k8 * 8 + t * 2 + pair

of which a thread `4 g + t` has those of either half, f, k8 and pair. In a tile, columns of a chunk
are in another order, so that what is t there is f and k8 here, and so on.

Rows of 32 words are what banks of shared memory have room for. Words of a row are swapped in 16
bytes by the row's number, so that no two threads ask a bank for different rows more often than they
must; rows of eight bits a code are in an order that serves this.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bits of a word's number, the lowest first, by what they are in a tile: a word has the four chunks
# of a code, of a pair of four bits each, of two pairs of two bits each, or of eight single bits.
_OF_TILE = gl.constexpr(
    {
        8: ("pair", "k8", "t0", "t1", "g0", "g1", "g2", "half", "f"),
        4: ("k8", "half", "t0", "t1", "g0", "g1", "g2", "f"),
        2: ("half", "f", "t0", "t1", "g0", "g1", "g2"),
        1: ("f", "t0", "t1", "g0", "g1", "g2"),
    }
)
# What these are in a chunk with its columns in their own order, by the size of groups.
_IN_ORDER = gl.constexpr(
    {
        32: {"k8": "t0", "t0": "k8", "t1": "f", "f": "t1"},
        16: {"k8": "t0", "t0": "t1", "t1": "k8", "f": "f"},
    }
)
# The bits of a row's number in shared memory, as places of those in a tile.
_ROW_BITS = gl.constexpr({8: (0, 3, 1, 2), 4: (0, 1, 2), 2: (0, 1), 1: (0,)})
_WIDTH = gl.constexpr(5)  # bits of a word's number in its row

REGISTERS = gl.constexpr(
    ("pair", "half", "k8", "f")
)  # as a left factor has them, the lowest bit first
LANES = gl.constexpr(("t0", "t1", "g0", "g1", "g2"))
# Rows and columns of a chunk, from the highest.
AXES = gl.constexpr(("half", "g", "f", "k8", "t1", "t0", "pair"))


@gluon.constexpr_function
def words_of(bits: int) -> int:
    """In a tile."""
    return 1 << len(_OF_TILE.value[bits])


@gluon.constexpr_function
def names_of_bits(bits: int, group: int) -> tuple[str, ...]:
    """What the bits of a word's number in shared memory are in a chunk, the lowest first."""
    of_tile = [_IN_ORDER.value[group].get(name, name) for name in _OF_TILE.value[bits]]
    rows = [of_tile[_WIDTH.value + place] for place in _ROW_BITS.value[bits]]
    return (*of_tile[: _WIDTH.value], *rows)


@gluon.constexpr_function
def row_bits(bits: int) -> tuple[int, ...]:
    """Where in the number of a tile's row those of a row of shared memory are, the lowest first."""
    found: tuple[int, ...] = _ROW_BITS.value[bits]
    return found


@gluon.constexpr_function
def bases(names: tuple[str, ...], bits: int, group: int) -> list[list[int]]:
    """How much each of these adds to a word's row and place in it: nothing, if it is in a word."""
    found = names_of_bits(bits, group)
    numbers = [1 << found.index(name) if name in found else 0 for name in names]
    return [[number >> _WIDTH.value, number & (1 << _WIDTH.value) - 1] for number in numbers]


@gluon.constexpr_function
def register_names(bits: int, group: int) -> tuple[str, ...]:
    """Those of which a thread has several words."""
    return tuple(name for name in REGISTERS.value if name in names_of_bits(bits, group))


@gluon.constexpr_function
def split_shape(bits: int) -> list[int]:
    """Of a tile's words, its bits, the highest first."""
    return [2] * len(_OF_TILE.value[bits])


@gluon.constexpr_function
def axes(bits: int, group: int) -> list[int]:
    """The places in `split_shape` of the bits that are left of `AXES`."""
    found = names_of_bits(bits, group)[::-1]
    wanted = ("half", "g2", "g1", "g0", *AXES.value[2:])
    return [found.index(name) for name in wanted if name in found]


@gluon.constexpr_function
def joined_shape(bits: int, group: int) -> list[int]:
    """By `AXES`, those that are in a word being 1."""
    found = names_of_bits(bits, group)
    return [8 if name == "g" else 2 if name in found else 1 for name in AXES.value]
