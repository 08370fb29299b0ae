"""Kernels that start while the one before them in the stream is still at work.

A launch costs a microsecond or two, and the first bytes from memory another: as long as a small
matrix takes to read. From Hopper on a kernel may say that the next one can start already, and the
next one says when it needs the results of those before. Until then it may read what no kernel
writes, such as weights, or what was done before the kernel ahead began, if that one `follow`s; and
it may write nothing. As each kernel that starts early waits before it ends, all that came before
the last one is done too.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@memoise
def early_launch(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that takes `EARLY`: early, where `device` can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"EARLY": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Let the next kernel start, then wait for what came before: its results are read below."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for what came before, then let the next kernel start: what this one finds done is done
    for the next one too, before that waits itself."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def await_last(EARLY: tl.constexpr):
    """Wait for what came before, and keep the next kernel waiting: one that fills the GPU is spread
    unevenly over it while another is still there."""
    if EARLY:
        gdc_wait()
