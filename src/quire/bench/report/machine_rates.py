"""How fast this machine moves bytes and multiplies matrices, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quire.bench.report.stopwatch import Call, seconds_per_call
from quire.progress import say_step
from quire.runner.device import free_cached_memory

GPU_COPY_BYTES, CPU_COPY_BYTES = 4 << 30, 256 << 20  # many times what any cache holds
GPU_MATRIX, CPU_MATRIX = 8192, 1536  # rows and columns
GPU_ROOM = 2 << 30  # bytes that are enough to measure again


@dataclass(frozen=True)
class Rates:
    copy: float  # bytes/s, read and written ones both counted
    matrix: float  # operations/s, an addition and a multiplication being two

    def of_devices(self, count: int) -> Rates:
        """The rates of `count` devices together."""
        return Rates(count * self.copy, count * self.matrix)


@cache
def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Takes about a second. Before a model fills the memory, there is room for it."""
    say_step("measuring how fast this machine copies and multiplies")
    return rates_now(device, dtype)


def rates_now(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured anew: a GPU that has been at work for a while multiplies a sixth slower."""
    rates = Rates(_copy_rate(device), _matrix_rate(device, dtype))
    free_cached_memory()
    return rates


def _copy_rate(device: torch.device) -> float:
    size = CPU_COPY_BYTES
    if device.type == "cuda":
        size = min(GPU_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = GPU_MATRIX if device.type == "cuda" else CPU_MATRIX
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def _seconds(call: Call, device: torch.device) -> float:
    """The median on a GPU, whose first calls run at clocks that it cannot hold.

    The best on a CPU, which others use at the same time.
    """
    sample = seconds_per_call(call, device)
    return sample.median if device.type == "cuda" else min(sample.runs)
