"""Rounding that looks at outputs: codes that leave the least error of a matrix's own products.

With the Hessian `H` of a matrix's inputs, what an error `e` of one row's weights does to its
outputs is `e H eᵀ`. Coordinate descent lowers it (QuantEase, Behdin et al., 2023): begin with the
nearest codes, and go over the inputs again and again, giving each the code that is best while all
others stay as they are. No step raises the error, every code stays in its range, and scales are
those that each group has by itself.

    errors     codes - weights, one row an input
    pull       for each input, by how much its weights and the errors of all others would best move

Inputs are taken in blocks: within one each step is followed by the next, and what a block changed
comes to all others as one product. Tensors are turned, so that what one step needs lies together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.dequantise import spread, unpack_nibbles
from quire.kernels.quantise import to_groups

MIDDLE, LAST = 8, 15  # of the codes of four bits
# Of the mean of the Hessian's diagonal, added to it: a few texts tell little of most directions.
DAMPING = 0.1
SWEEPS = 4
BLOCK = 64  # inputs
HUGE = 1e30


def round_to_groups(
    weights: Tensor, hessian: Tensor | None, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 of `weights` `[rows, inputs]` in float32, and the scales of groups of inputs.

    A number is `(code - 8) * scale`. Without a Hessian each number has the nearest code.
    """
    packed, scales = to_groups(weights.contiguous(), 4, group, False, scale_dtype)
    codes = unpack_nibbles(packed)
    if hessian is not None and hessian.any():
        codes = descend(weights, codes, spread(scales.float(), group, weights.shape[1]), hessian)
    return codes, scales


def descend(weights: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor) -> Tensor:
    """Codes by coordinate descent from `codes`; `scales` are those of each number."""
    order = hessian.diagonal().argsort(descending=True)  # what counts most is settled first
    wanted = weights.t()[order].contiguous()
    # A group of zeros has the scale 0: with a huge one no code but the middle is near.
    steps = torch.where(scales == 0, HUGE, scales).t()[order].contiguous()
    errors = (codes.t()[order].float() - MIDDLE) * steps - wanted
    damped = hessian[order][:, order]
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    influence = damped / damped.diagonal().unsqueeze(1)
    pull = influence @ errors
    for _ in range(SWEEPS):
        for start in range(0, len(errors), BLOCK):
            inputs = slice(start, start + BLOCK)
            before = errors[inputs].clone()
            _descend_block(wanted, steps, errors, pull[inputs].clone(), influence, inputs)
            pull.addmm_(influence[:, inputs], errors[inputs] - before)
    found = ((errors + wanted) / steps + MIDDLE).round_().clamp_(0, LAST).to(torch.uint8)
    return found[order.argsort()].t()


def _descend_block(
    wanted: Tensor, steps: Tensor, errors: Tensor, pull: Tensor, influence: Tensor, inputs: slice
) -> None:
    """One step for each input of a block; `pull` is the block's own and is kept true to it."""
    among = influence[inputs, inputs]
    for i, row in enumerate(range(inputs.start, min(inputs.stop, len(errors)))):
        best = (wanted[row] - pull[i]).add_(errors[row])
        code = (best / steps[row]).add_(MIDDLE).round_().clamp_(0, LAST)
        error = code.sub_(MIDDLE).mul_(steps[row]).sub_(wanted[row])
        pull.addr_(among[:, i], error - errors[row])
        errors[row] = error
