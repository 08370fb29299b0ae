"""What this machine has, and what Quire takes of it by default."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from quire.errors import ConfigError

BF16_FEATURES = {"amx_bf16", "avx512_bf16"}  # without one of them bfloat16 is slower than float32


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for and torch finds no CUDA device; use 'cpu'.")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's 16-bit type on a GPU; on a CPU what it is made for."""
    if name != "auto":
        return _dtype(name)
    if device.type == "cpu":
        return torch.bfloat16 if BF16_FEATURES & cpu_features() else torch.float32
    return _dtype(checkpoint) if checkpoint in ("float16", "bfloat16") else torch.bfloat16


def _dtype(name: str | None) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    assert isinstance(dtype, torch.dtype)
    return dtype


@cache
def cpu_features() -> frozenset[str]:
    """The flags the kernel reports; empty where it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(flags, ":").split(":", 1)[1].split())


def free_cached_memory() -> None:
    """Give back what torch keeps of the device's memory for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine(device: torch.device) -> str:
    """One phrase for tables: what the figures were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
