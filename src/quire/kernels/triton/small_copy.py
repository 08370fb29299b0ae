"""Small copies between pinned host memory and the device, by a kernel instead of a copy engine.

A copy engine serves one copy after the other. While gigabytes of KV move between host and device, a
step's few kilobytes would wait behind them; a kernel reaches over to the other side at once. And an
idle engine begins some microseconds after the kernel ahead has ended, and the kernel behind it some
after that.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

_WORDS = 1024

# Pinned memory that a kernel may still read or write. Torch knows only of its own copies, and would
# reuse the memory as soon as nothing here refers to it.
_in_use: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
_lock = threading.Lock()


def small_copy(source: Tensor, target: Tensor, pinned: Tensor) -> torch.cuda.Event:
    """Queue a copy between contiguous tensors of one size; `pinned` is the one on the host.

    The event is behind the copy.
    """
    if source.nbytes:
        words = torch.int64 if source.nbytes % 8 == 0 else torch.uint8
        flat_source, flat_target = (each.view(-1).view(words) for each in (source, target))
        count = flat_source.numel()
        _copy[(cdiv(count, _WORDS),)](flat_source, flat_target, count, WORDS=_WORDS)
    return kept_until_done(pinned)


def copy_both(
    pinned: Tensor, target: Tensor, more: Tensor, more_target: Tensor
) -> torch.cuda.Event:
    """Queue two copies in one launch: int32 of the host, and int64 that are on the device."""
    count, programs = pinned.numel(), cdiv(pinned.numel(), _WORDS)
    _copy_both[(programs + cdiv(more.numel(), _WORDS),)](
        pinned, target, count, more, more_target, more.numel(), programs, WORDS=_WORDS
    )
    return kept_until_done(pinned)


def kept_until_done(*pinned: Tensor) -> torch.cuda.Event:
    """An event behind the kernels that are queued, which may use this memory of the host."""
    event = torch.cuda.Event()
    event.record()
    with _lock:
        while _in_use and _in_use[0][0].query():
            _in_use.popleft()
        _in_use.append((event, pinned))
    return event


@triton.jit(do_not_specialize=["count"])
def _copy(source, target, count, WORDS: tl.constexpr):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit(
    do_not_specialize=["count", "more_count", "programs"],
    do_not_specialize_on_alignment=["more"],
)
def _copy_both(source, target, count, more, more_target, more_count, programs, WORDS: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, WORDS)
    if program < programs:
        at = program * WORDS + lane
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
    else:
        at = (program - programs) * WORDS + lane
        tl.store(more_target + at, tl.load(more + at, mask=at < more_count), mask=at < more_count)
