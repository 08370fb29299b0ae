"""Which experts in MXFP4 go to the kernels for Hopper GPUs, `hopper_narrow.py` and
`hopper_fours.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.four_bits import GROUP, FourBitExperts
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.triton.tried import is_hopper, tried

_ALIGNED = 16  # elements: rows of tokens and results begin where hardware copies from and to


def is_for_hopper(x: Tensor, weights: FourBitExperts) -> bool:
    if x.dtype != torch.bfloat16 or not x.is_cuda or weights.scale_dtype is not None:
        return False
    return (
        x.shape[1] % _ALIGNED == weights.codes.shape[1] % _ALIGNED == 0
        and is_hopper(x.device)
        and _can_be_built(x.device, x.dtype)
    )


@tried("Experts in MXFP4 are")
def _can_be_built(device: torch.device, dtype: torch.dtype) -> None:
    """One pair, by each of them."""
    from quire.kernels.triton.experts import hopper_fours, hopper_narrow

    quarter, rows = 2 * GROUP, 32
    x = torch.zeros(1, 4 * quarter, dtype=dtype, device=device)
    weights = FourBitExperts(
        torch.zeros(1, rows, quarter, dtype=torch.int16, device=device),
        torch.zeros(1, quarter // GROUP, rows, dtype=torch.int32, device=device),
    )
    order = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.tensor([[0], [0], [1]], dtype=torch.int32, device=device)
    for product, size in ((hopper_narrow.product, 16), (hopper_fours.product, 128)):
        product(x, weights, Blocks(order, table, size), Activation.SILU, None)
