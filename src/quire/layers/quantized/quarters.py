"""Four-bit matrices of experts, put in the order of grouped products once they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.four_bits import quarter_of, to_quarters
from quire.layers.matrix import Matrix
from quire.layers.weights import parameter, view


def replace_codes(whole: Matrix, experts: Sequence[Matrix], is_whole: bool) -> None:
    """Give a matrix, and its parts that are the experts', codes in quarters instead of its own.

    They are a little longer, where columns are filled up: so this is other memory.
    """
    rows, device = whole.out_features, whole.get_parameter("weight").device
    row_bytes = 2 * quarter_of(whole.in_features)
    codes = parameter(rows, row_bytes, dtype=torch.uint8, device=device)
    height = rows // len(experts)
    for i, expert in enumerate(experts):
        mine = codes[i * height : (i + 1) * height]
        mine.copy_(to_quarters(expert.get_parameter("weight"), is_whole).view(torch.uint8))
        _replace(expert, "weight", view(mine))
    _replace(whole, "weight", codes)


def _replace(matrix: Matrix, name: str, found: torch.nn.Parameter) -> None:
    """Also where a frozen matrix, and a part of one, has its parameters."""
    matrix._parameters[name] = found
    if name in matrix.__dict__:
        matrix.__dict__[name] = found
