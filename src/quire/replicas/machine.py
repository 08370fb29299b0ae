"""What of the machine, and of the settings, each replica gets for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace

from quire.config import EngineConfig
from quire.hardware import usable_cores

ASK_S = 20.0


def replica_config(config: EngineConfig, number: int, count: int, num_gpus: int) -> EngineConfig:
    """Its own folders of the SSD cache, and its part of a GPU that several share.

    An engine counts what its neighbours on the GPU hold as taken: the second of two may fill it up
    to the whole of what is allowed, of which the first, started before it, holds a half.
    """
    if config.ssd_cache_dir is not None:
        folders = [part.strip() for part in config.ssd_cache_dir.split(",")]
        own = ",".join(os.path.join(folder, f"replica-{number}") for folder in folders)
        config = replace(config, ssd_cache_dir=own)
    if num_gpus:
        sharing = len(range(number % num_gpus, count, num_gpus))
        part = (number // num_gpus + 1) / sharing
        config = replace(config, gpu_memory_utilization=part * config.gpu_memory_utilization)
    return config


def start_order(count: int, num_gpus: int) -> list[range]:
    """Replicas that may be started at the same time, one such group after the other.

    The first is alone: what it fetches, the others find. Those on one GPU come in turn.
    """
    at_once = num_gpus or count
    later = [range(at, min(at + at_once, count)) for at in range(at_once, count, at_once)]
    return [range(1), *filter(len, [range(1, min(at_once, count))]), *later]


def replica_environment(number: int, count: int, gpus: list[str]) -> dict[str, str]:
    """The GPU it runs on, and the CPU threads that are its part."""
    environment = {}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // count))
    return environment


def find_gpus(device: str) -> list[str]:
    """The names of those that may be used, as CUDA_VISIBLE_DEVICES has them."""
    if device == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return asked.stdout.split()
