"""Kernels in Gluon, an experimental part of Triton that each version changes: which can be built.

That is tried once, on the smallest problem there is. In a dry run nothing is compiled yet when a
trial is over. If a kernel cannot be, in the end, all trials are forgotten, and the first real step
makes them anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache as memoise
from functools import wraps

import torch

Launch = Callable[..., None]
Trial = Callable[..., bool]

_FORGET: list[Callable[[], None]] = []  # what was tried, one for each trial


def tried(slower: str) -> Callable[[Launch], Trial]:
    """Makes a trial of what launches a kernel: whether it could. Else, what is `slower` is said."""

    def trial_of(launch: Launch) -> Trial:
        @memoise
        @wraps(launch)
        def trial(*args: object) -> bool:
            try:
                launch(*args)
            except Exception as error:
                warnings.warn(f"{slower} slower with this version of Triton: {error}", stacklevel=2)
                return False
            return True

        _FORGET.append(trial.cache_clear)
        return trial

    return trial_of


def forget_trials() -> None:
    for forget in _FORGET:
        forget()


@memoise
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
