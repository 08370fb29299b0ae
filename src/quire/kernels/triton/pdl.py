"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

A launch costs a microsecond or two, and the first bytes from memory another: as long as a small
matrix takes to read. From Hopper on a kernel may say that the next one can start already, and the
next one says when it needs the results of those before. Until then it may read what no kernel
writes, such as weights, or what was done before the kernel ahead began, if that one calls
`wait_then_trigger`; and it may write nothing. As each kernel that starts early waits before it
ends, all that came before the last one is done too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache as memoise
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@memoise
def pdl_launch(device: torch.device) -> dict[str, bool]:
    """The arguments of a launch whose kernel takes `PDL`: on, where `device` has it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"PDL": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    if not (_can_be_called(gdc_wait) and _can_be_called(gdc_launch_dependents)):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def _can_be_called(function: Callable[..., Any]) -> bool:
    """Triton's compiler passes `_semantic`; its version 3.4 still declares these two without."""
    return "_semantic" in inspect.signature(function).parameters


@triton.jit
def trigger_then_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for what came before: its results are read below."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_trigger(PDL: tl.constexpr):
    """Wait for what came before, then let the next kernel start: what this one finds done is done
    for the next one too, before that waits itself."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for what came before, without letting the next kernel start: one that fills the GPU is
    spread unevenly over it while this one still runs."""
    if PDL:
        gdc_wait()
