"""What the Gluon kernel of a type is compiled for."""

from __future__ import annotations

from functools import cache as memoise
from typing import NamedTuple

from quire.kernels.gguf_tiles import BYTES, COLUMNS, HALVES, NIBBLES, ROWS, TileType

TILES = 4  # of a step: one of each warp


class Settings(NamedTuple):
    """A type's form (`TileType`), and what follows from it."""

    bits: int
    upper: int
    zero: int
    group: int
    scales: int
    scale_zero: int
    has_lows: bool
    table: tuple[int, ...]
    in_bytes: bool  # numbers, when they are multiplied by scales
    has_wide: bool
    # Scales of a group, or those that tiles share: bytes of a word, and words for rows g and g + 8.
    scale_bytes: int
    scale_words: int
    wide_words: int

    @property
    def step_bytes(self) -> int:
        """Of shared memory."""
        codes = ROWS * COLUMNS * (self.bits + self.upper) // 8
        scales = COLUMNS // self.group * 8 * self.scale_words * self.scale_bytes
        return TILES * (codes + scales + 32 * self.wide_words * self.has_wide)


@memoise
def settings_of(kind: TileType) -> Settings:
    has_pairs = kind.has_lows and kind.scales != NIBBLES
    group_bytes = (4 if kind.scales == HALVES else 2) * (2 if has_pairs else 1)
    return Settings(
        bits=kind.bits,
        upper=kind.upper,
        zero=kind.zero,
        group=kind.group,
        scales=kind.scales,
        scale_zero=kind.scale_zero,
        has_lows=kind.has_lows,
        table=kind.table,
        in_bytes=kind.bits == 8 or bool(kind.table),
        has_wide=kind.scales in (BYTES, NIBBLES),
        scale_bytes=min(group_bytes, 4),
        scale_words=max(1, group_bytes // 4),
        wide_words=2 if kind.has_lows else 1,
    )
