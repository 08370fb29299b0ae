"""Rounding that looks at outputs: held to the same search written plainly, code by code."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.quantize import rounding
from quire.quantize.rounding import DAMPING, LAST, MIDDLE, SWEEPS, round_to_groups

ROWS, INPUTS, GROUP = 6, 96, 32


def inputs(tokens: int, seed: int = 0) -> Tensor:
    """Some are far larger than others, and they go together, as those of models do."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(7)
    mixed = torch.randn(24, INPUTS, generator=shared)
    sizes = torch.rand(INPUTS, generator=shared).pow(-0.7)
    own = torch.randn(tokens, INPUTS, generator=generator)
    return (torch.randn(tokens, 24, generator=generator) @ mixed + own) * sizes


@pytest.fixture
def weights() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, INPUTS) * 0.05


def rounded(weights: Tensor, hessian: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, scales = round_to_groups(weights, hessian, GROUP, torch.bfloat16)
    return codes, scales.float().repeat_interleave(GROUP, dim=1)


def best_scales(weights: Tensor, counts: Tensor, scales: Tensor, damped: Tensor) -> Tensor:
    """Group by group the least of a parabola, which three scales tell."""
    scales = scales.clone()
    for start in range(0, INPUTS, GROUP):
        group = slice(start, start + GROUP)

        def size(factor: float, group: slice = group) -> Tensor:
            trial = scales.double()
            trial[:, group] *= factor
            errors = counts * trial - weights
            return ((errors @ damped) * errors).sum(-1, keepdim=True)

        low, middle, high = size(0.9), size(1.0), size(1.1)
        factor = 1 - 0.1 * (high - low) / 2 / (high - 2 * middle + low)
        scales[:, group] = (scales[:, group] * factor).bfloat16().float()
    return scales


def test_each_code_is_the_best_while_all_others_stay(weights: Tensor) -> None:
    hessian = inputs(400).T @ inputs(400)
    codes, scales = rounded(weights, None)
    damped = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(INPUTS)
    numbers = (codes.double() - MIDDLE) * scales
    for sweep in range(SWEEPS):
        if sweep:
            counts = (numbers / scales).round()
            scales = best_scales(weights, counts, scales, damped)
            numbers = counts * scales
        for i in damped.diagonal().argsort(descending=True):
            trials = numbers.repeat(LAST + 1, 1, 1)
            trials[:, :, i] = (torch.arange(LAST + 1).unsqueeze(1) - MIDDLE) * scales[:, i].double()
            errors = trials - weights
            sizes = ((errors @ damped) * errors).sum(-1)
            numbers = trials[sizes.argmin(0), torch.arange(ROWS)]
    found, found_scales = rounded(weights, hessian)
    assert (found_scales == scales).float().mean() > 0.95  # a tie in float32, once more
    right = (numbers / scales + MIDDLE).round()
    assert (found == right).float().mean() > 0.99  # a tie may fall to the other side in float32


def test_outputs_err_by_half_as_much_as_if_each_number_is_rounded_alone(weights: Tensor) -> None:
    seen, others = inputs(400), inputs(400, seed=2)
    errors = {}
    for name, hessian in {"alone": None, "found": seen.T @ seen}.items():
        codes, scales = rounded(weights, hessian)
        errors[name] = (codes.float() - MIDDLE) * scales - weights
    for x in (seen, others):
        assert (x @ errors["found"].T).norm() < 0.6 * (x @ errors["alone"].T).norm()


def test_more_sweeps_never_raise_the_error(
    weights: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(400)
    hessian = x.T @ x
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(INPUTS)
    codes, scales = rounded(weights, None)
    alone = (codes.float() - MIDDLE) * scales - weights
    sizes = [float(((alone @ damped) * alone).sum())]
    for sweeps in range(1, 6):
        monkeypatch.setattr(rounding, "SWEEPS", sweeps)
        codes, scales = rounded(weights, hessian)
        errors = (codes.float() - MIDDLE) * scales - weights
        sizes.append(float(((errors @ damped) * errors).sum()))
    # Scales are rounded to bfloat16, which may cost as much as a sweep that finds little gains.
    assert all(after <= before * 1.002 for before, after in pairwise(sizes))
    assert sizes[1] < 0.7 * sizes[0]


def test_groups_of_zeros_and_inputs_that_are_never_used(weights: Tensor) -> None:
    weights[3, :GROUP] = 0
    x = inputs(64)
    x[:, 5] = 0
    codes, scales = rounded(weights, x.T @ x)
    assert (codes[3, :GROUP] == MIDDLE).all() and (scales[3, :GROUP] == 0).all()
    nearest = (weights[:, 5] / scales[:, 5] + MIDDLE).round().clamp(0, LAST)
    assert torch.equal(nearest[scales[:, 5] != 0], codes[:, 5].float()[scales[:, 5] != 0])
    unknown, alone = rounded(weights, torch.zeros(INPUTS, INPUTS)), rounded(weights, None)
    assert all(map(torch.equal, unknown, alone))
