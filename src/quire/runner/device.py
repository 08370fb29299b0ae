"""What this machine has, and what Quire takes of it by default."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

from quire.errors import ConfigError

ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
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
    facts = _cpu_facts()
    return frozenset((facts.get("flags") or facts.get("features") or "").split())


def cpu_name() -> str:
    """As its maker calls it. ARM's report only a number of the part."""
    facts = _cpu_facts()
    known = facts.get("model name") or ARM_PARTS.get(facts.get("cpu part", ""))
    return known or platform.processor() or platform.machine()


def _cpu_facts() -> dict[str, str]:
    """What the kernel says of the first core, by names in lower case."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def free_cached_memory() -> None:
    """Give back what is free and kept for later: by torch of the GPU's memory, by the C library of
    the host's. Without that, most of a model's weights stay with the process on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and needs it
    if trim is not None:
        trim(0)
