"""What the figures were measured on."""

from __future__ import annotations

import os
import platform

import torch

from quire import __version__
from quire.hardware import cpu_name

THREAD_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")  # they change much

Facts = dict[str, str | int]


def machine_facts(device: torch.device) -> Facts:
    facts: Facts = {"cpu": cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts = {"gpu": torch.cuda.get_device_name(device), **facts}
    facts |= {
        "quire": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
    return facts | {name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ}


def in_words(facts: Facts) -> str:
    """`Neoverse-N1, 2 threads; torch 2.13, python 3.11`."""
    chip = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads"
    versions = [f"{name} {facts[name]}" for name in ("torch", "cuda", "python") if name in facts]
    threads = [f"{name}={facts[name]}" for name in THREAD_SETTINGS if name in facts]
    return f"{chip}; {', '.join(versions + ([] if 'gpu' in facts else threads))}"
