"""What Quire takes of this machine by default."""

from __future__ import annotations

import ctypes
import time
from importlib.util import find_spec

import torch

from quire.errors import ConfigError
from quire.hardware import is_made_for_bfloat16
from quire.host_memory import own_memory
from quire.kernels import lent_memory
from quire.kernels.linear import IS_ARM
from quire.layers.quantized.gguf import GGUFFormats
from quire.models.config import CheckpointConfig

# torch's build for ARM has an allocator of its own, mimalloc. It gives memory back in parts, each
# of them when it is called a while after that was freed: large ones when it is asked for a large
# one, and those that other threads have left behind when it is asked for many small ones.
PURGES, PURGE_DELAY_S = 6, 0.15
PURGE_SIZES = 1 << 10, 100 << 10, 64 << 20
PURGE_COUNTS = 1000, 50, 1
LITTLE = 8 << 20  # bytes: no reason to wait


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for and torch finds no CUDA device; use 'cpu'.")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, config: CheckpointConfig | None, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's 16-bit type on a GPU; on a CPU what it is made for, but float32 with
    a GGUF file's own types, whose kernels take nothing else. Measured on a Xeon with AMX: where
    each product turns bfloat16 into float32 and back, one stream of a Q4_K_M file is half as fast.
    """
    if name != "auto":
        return _dtype(name)
    if device.type == "cpu":
        keeps_types = config is not None and isinstance(config.formats, GGUFFormats)
        return torch.bfloat16 if is_made_for_bfloat16() and not keeps_types else torch.float32
    dtype = None if config is None else config.dtype
    return _dtype(dtype) if dtype in ("float16", "bfloat16") else torch.bfloat16


def keeps_types(dtype: str, device: torch.device) -> bool:
    """Whether matrices are multiplied as they are stored, if no type to compute in was asked for:
    on a CPU those of a GGUF file, those of 16 bits, and experts in MXFP4; on a GPU of NVIDIA's the
    quantised ones of a GGUF file, of experts those in MXFP4."""
    if device.type == "cpu":
        return dtype == "auto" and find_spec("numba") is not None
    return dtype == "auto" and torch.version.cuda is not None


def _dtype(name: str | None) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    assert isinstance(dtype, torch.dtype)
    return dtype


def free_cached_memory() -> None:
    """Give back what is free and kept for later: by torch of the GPU's memory, by kernels and the
    C library of the host's. Without that, most of a model's weights stay with the process on a CPU.
    """
    lent_memory.give_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and needs it
    if trim is not None:
        trim(0)


def wait_until_freed(level: int) -> None:
    """Let this process's memory come down to about `level` bytes, where that takes time."""
    for _ in range(PURGES if IS_ARM else 0):
        held = own_memory()
        if held < level + LITTLE:
            return
        time.sleep(PURGE_DELAY_S)
        for size, count in zip(PURGE_SIZES, PURGE_COUNTS, strict=True):
            [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        if held - own_memory() < LITTLE:
            return
