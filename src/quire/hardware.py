"""What this machine has, found without torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from quire.host_memory import free_host_memory

ARM_PARTS = {
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
BF16_FEATURES = {"amx_bf16", "avx512_bf16"}  # without one of them bfloat16 is slower than float32
CPU_POOL_LIMIT = 4 << 30
NAME_BYTES = 256


class Gpu(NamedTuple):
    name: str
    memory: int


def find_gpus() -> list[Gpu]:
    """Those that CUDA's driver shows to this process, if torch was built to use them."""
    version = _cuda_of_torch()
    if version is None:
        return []
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    return gpus_of(driver, version)


def gpus_of(driver: Any, version: int) -> list[Gpu]:
    """None if the driver is older than CUDA's major `version`: torch does without GPUs, then."""
    count, knows = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(knows)):
        return []
    if knows.value // 1000 < version or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(driver, number) for number in range(count.value)]


def _gpu(driver: Any, number: int) -> Gpu:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, NAME_BYTES, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return Gpu(name.value.decode(errors="replace"), memory.value)


def _cuda_of_torch() -> int | None:
    """The major version of CUDA that torch was built with, as a file of its own says."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *['\"](\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def is_made_for_bfloat16() -> bool:
    return bool(BF16_FEATURES & cpu_features())


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


def usable_cores() -> int:
    """The cores this process may run on, which in a container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_pool_bytes() -> int:
    """A quarter of what is free, four GiB at most: a laptop has other things to do."""
    return min(free_host_memory() // 4, CPU_POOL_LIMIT)
