"""`quire info`: what this machine has, and what Quire would use of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from quire import __version__
from quire.api.cli.parser import CommandParser
from quire.api.cli.terminal import dim, human_bytes

Facts = dict[str, str | int | list[str] | None]

EXAMPLES = """examples:
  quire info
  quire info --json
"""

# What decides how fast a CPU multiplies matrices; the kernel's list is ten times as long.
TELLING_FEATURES = [
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "asimd",
    "asimddp",
    "sve",
    "bf16",
    "i8mm",
]

PACKAGES = ("torch", "triton", "numba", "numpy", "tokenizers", "gguf")


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    sections = {"machine": _machine(), "versions": _versions(), "quire would use": _choices()}
    if args.json:
        print(json.dumps({name.replace(" ", "_"): facts for name, facts in sections.items()}))
        return 0
    for name, facts in sections.items():
        print(name)
        for label, value in facts.items():
            print(f"  {dim(f'{label:<13}', sys.stdout)} {_shown(label, value)}")
    return 0


def _machine() -> Facts:
    from quire.host_memory import free_host_memory
    from quire.runner.device import cpu_features, cpu_name

    features = cpu_features()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_features": [name for name in TELLING_FEATURES if name in features],
        "cores": _usable_cores(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_memory": free_host_memory(),
        "gpus": _gpus(),
    }


def _versions() -> Facts:
    found: Facts = {"quire": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _choices() -> Facts:
    import torch

    from quire.config import EngineConfig
    from quire.kernels.backend import backend_for
    from quire.models.demo import cache_folder
    from quire.runner.device import choose_device, choose_dtype
    from quire.runner.memory import cpu_pool_bytes

    device = choose_device("auto")
    on_gpu = device.type == "cuda"
    limits = EngineConfig().step_limits(device.type)
    share = f"{EngineConfig.gpu_memory_utilization:.0%} of the GPU, less weights and a step"
    return {
        "device": device.type,
        "dtype": str(choose_dtype("auto", None, device)).removeprefix("torch."),
        "backend": backend_for(device).name,
        "threads": torch.get_num_threads(),
        "pool": share if on_gpu else cpu_pool_bytes(),
        "step": f"{limits.tokens:,} tokens, {limits.sequences} sequences",
        "model_folder": str(cache_folder()),
    }


def _usable_cores() -> int:
    """The cores this process may run on, which in a container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[str]:
    import torch

    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [f"{gpu.name}, {human_bytes(gpu.total_memory)}" for gpu in found]


def _shown(label: str, value: str | int | list[str] | None) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return human_bytes(value) if label in ("memory", "free_memory", "pool") else str(value)
    return value or "not installed"
