"""Rounding that looks at outputs: codes that leave the least error of a matrix's own products.

With the Hessian `H` of a matrix's inputs, what an error `e` of one row's weights does to its
outputs is `e H eᵀ`. Coordinate descent lowers it (QuantEase, Behdin et al., 2023): begin with the
nearest codes, and go over the inputs again and again, giving each the code that is best while all
else stays as it is. Between two sweeps each group's scale is fitted to its codes in the same way.
No code leaves its range, and no step but the rounding of a scale raises the error.

    errors     numbers - weights, one row an input
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
DAMPING = 0.3
SWEEPS = 3
BLOCK = 64  # inputs
ZERO_GROUP_STEP = 1e30
TINY = 1e-30


def round_to_groups(
    weights: Tensor, hessian: Tensor | None, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 of `weights` `[rows, inputs]` in float32, and the scales of groups of inputs.

    A number is `(code - 8) * scale`. Without a Hessian, or with one that is not finite (the inputs
    were not), each number has the nearest code.
    """
    packed, scales = to_groups(weights.contiguous(), 4, group, False, scale_dtype)
    codes = unpack_nibbles(packed)
    if not tells_something(hessian):
        return codes, scales
    assert hessian is not None
    descent = Descent(weights, codes, scales, hessian, group)
    for sweep in range(SWEEPS):
        if sweep:
            descent.fit_scales(scale_dtype)
        descent.sweep()
    return descent.codes(), descent.scales(scale_dtype)


def tells_something(hessian: Tensor | None) -> bool:
    return hessian is not None and bool(hessian.any()) and bool(hessian.isfinite().all())


class Descent:
    """Inputs are sorted by the Hessian's diagonal here: the largest comes first."""

    def __init__(
        self, weights: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, group: int
    ) -> None:
        self._group = group
        self._order = hessian.diagonal().argsort(descending=True)
        self._group_of = self._order // group
        self._weights = weights.t()[self._order].contiguous()
        # A group of zeros has the scale 0. In its place a huge one leaves the middle code to all.
        steps = spread(scales.float(), group, weights.shape[1])
        self._steps = torch.where(steps == 0, ZERO_GROUP_STEP, steps).t()[self._order].contiguous()
        self._errors = (codes.t()[self._order].float() - MIDDLE) * self._steps - self._weights
        self._hessian = hessian[self._order][:, self._order]
        self._hessian.diagonal().add_(DAMPING * self._hessian.diagonal().mean())
        self._influence = self._hessian / self._hessian.diagonal().unsqueeze(1)
        self._pull = self._influence @ self._errors

    def sweep(self) -> None:
        for start in range(0, len(self._errors), BLOCK):
            inputs = slice(start, start + BLOCK)
            before = self._errors[inputs].clone()
            self._sweep_block(inputs)
            change = self._errors[inputs] - before
            self._pull.addmm_(self._influence[:, inputs], change)

    def _sweep_block(self, inputs: slice) -> None:
        """One step for each input of a block, whose own pull is kept true to it."""
        weights, steps, errors = (
            each[inputs] for each in (self._weights, self._steps, self._errors)
        )
        pull, among = self._pull[inputs].clone(), self._influence[inputs, inputs]
        for i in range(len(errors)):
            best = (weights[i] - pull[i]).add_(errors[i])
            code = (best / steps[i]).add_(MIDDLE).round_().clamp_(0, LAST)
            error = code.sub_(MIDDLE).mul_(steps[i]).sub_(weights[i])
            pull.addr_(among[:, i], error - errors[i])
            errors[i] = error

    def fit_scales(self, scale_dtype: torch.dtype) -> None:
        """Give each group the scale that is best for its codes while all others stay."""
        counts = self._centred()
        for group in range(len(counts) // self._group):
            inputs = (self._group_of == group).nonzero().squeeze(1)
            own, old = counts[inputs], self._steps[inputs[0]]
            slope = (own * (self._hessian[inputs] @ self._errors)).sum(0)
            curve = (own * (self._hessian[inputs][:, inputs] @ own)).sum(0)
            best = (old - slope / curve.clamp(min=TINY)).to(scale_dtype).float()
            new = torch.where((curve > 0) & (best != 0), best, old)
            self._steps[inputs] = new
            self._errors[inputs] = own * new - self._weights[inputs]
        self._pull = self._influence @ self._errors

    def _centred(self) -> Tensor:
        return ((self._errors + self._weights) / self._steps).round_()

    def codes(self) -> Tensor:
        found = self._centred().add_(MIDDLE).clamp_(0, LAST).to(torch.uint8)
        return found[self._order.argsort()].t()

    def scales(self, scale_dtype: torch.dtype) -> Tensor:
        """One for each group, in the order of the inputs."""
        firsts = self._order.argsort()[:: self._group]
        steps = self._steps[firsts].t()
        return torch.where(steps == ZERO_GROUP_STEP, 0, steps).to(scale_dtype)
