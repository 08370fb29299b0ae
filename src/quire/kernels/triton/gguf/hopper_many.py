"""More than a few rows times a matrix in tiles, on Hopper GPUs (`hopper_products/many.py`)."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.gguf_tiles import GGUFTiles
from quire.kernels.triton.gguf import ring
from quire.kernels.triton.gguf.ring_settings import settings_of
from quire.kernels.triton.hopper_products import many

UNPACKING = 70  # rows of x that are multiplied while as many weights are unpacked


def many_rows(x: Tensor, matrix: GGUFTiles, bias: Tensor | None, out: Tensor) -> None:
    """`F.linear` into columns of `out`; rows of x begin where hardware copies from."""
    settings = settings_of(matrix.kind)
    packed = many.PackedMatrix(
        parts=(matrix.codes, matrix.upper, matrix.scale, matrix.wide),
        features=matrix.rows,
        columns=matrix.tiles * 128,
        settings=settings,
        make_ring=ring.make_ring,
        fetch=ring.fetch,
        take=ring.take,
        numbers_of=ring.numbers_of,
        step_bytes=settings.step_bytes,
        unpacking=UNPACKING,
    )
    many.many_rows(x, packed, bias, out)
