"""More than a few rows times a four-bit matrix, on Hopper GPUs (`hopper_products/many.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.hopper_products import many
from quire.kernels.triton.int4 import ring

# Unpacking takes as long as so many rows. Measured on an H200 with 384 to 1,024 rows of Qwen3-8B's
# products: programs of 128 rows took 5 to 17 % longer than those of 256.
UNPACKING = 45


def many_rows(x: Tensor, matrix: Int4Tiles, bias: Tensor | None) -> Tensor:
    """`F.linear`, where scales are of x's type; rows of x begin where hardware copies from."""
    words, scale, zero, group = matrix
    features, columns = len(words), x.shape[1]
    out = torch.empty((len(x), features), dtype=x.dtype, device=x.device)
    packed = many.PackedMatrix(
        parts=(words, scale, words.view(torch.uint8) if zero is None else zero),
        features=features,
        columns=columns,
        settings=ring.Settings(group, zero is not None),
        make_ring=ring.make_ring,
        fetch=ring.fetch,
        take=ring.take,
        numbers_of=ring.numbers_of,
        step_bytes=4 * (1024 + 3 * 16 * max(1, 128 // group)),
        unpacking=UNPACKING,
    )
    many.many_rows(x, packed, bias, out)
    return out
