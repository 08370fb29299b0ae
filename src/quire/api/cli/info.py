"""`quire info`: what this machine has, what Quire would use of it, and what a model takes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from quire import __version__
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser, UsageError
from quire.api.cli.terminal import dim
from quire.api.flag_names import flag_of
from quire.cache_folder import cache_folder
from quire.config import EngineConfig
from quire.hardware import (
    Gpu,
    cpu_features,
    cpu_name,
    cpu_pool_bytes,
    find_gpus,
    is_made_for_bfloat16,
    usable_cores,
)
from quire.host_memory import free_host_memory
from quire.progress import human_bytes

Facts = dict[str, str | int | list[str] | None]

EXAMPLES = """examples:
  quire info
  quire info --json
  quire info smollm2
  quire info Qwen/Qwen3-8B --quantization fp8
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

SIZES = ("memory", "free_memory", "pool", "weights")  # facts in bytes
PACKAGES = ("torch", "triton", "numba", "numpy", "tokenizers", "gguf")


# The settings that decide what a model's weights take.
OF_WEIGHTS = ("device", "dtype", "load_format", "task", "quantization")


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "named_model",
        metavar="MODEL",
        nargs="?",
        help="a model, to see how its weights would be held in memory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    others = [spec.name for spec in fields(EngineConfig) if spec.name not in OF_WEIGHTS]
    add_flags(parser, EngineConfig, "settings of MODEL", skip=others)


def run(args: argparse.Namespace) -> int:
    gpus = find_gpus()
    sections = {
        "machine": _machine(gpus),
        "versions": _versions(),
        "quire would use": _choices(gpus),
    }
    settings = given(EngineConfig, args)
    if args.named_model is not None:
        sections["model"] = _model(EngineConfig.create(model=args.named_model, **settings))
    elif settings:
        raise UsageError(f"{', '.join(map(flag_of, settings))} needs a MODEL.")
    if args.json:
        print(json.dumps({name.replace(" ", "_"): facts for name, facts in sections.items()}))
        return 0
    for name, facts in sections.items():
        print(name)
        for label, value in facts.items():
            print(f"  {dim(f'{label:<13}', sys.stdout)} {_shown(label, value)}")
    return 0


def _machine(gpus: list[Gpu]) -> Facts:
    features = cpu_features()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_features": [name for name in TELLING_FEATURES if name in features],
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_memory": free_host_memory(),
        "gpus": [f"{gpu.name}, {human_bytes(gpu.memory)}" for gpu in gpus],
    }


def _versions() -> Facts:
    found: Facts = {"quire": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _choices(gpus: list[Gpu]) -> Facts:
    """What the engine would choose by itself, told without it: a test holds the two together."""
    device = "cuda" if gpus else "cpu"
    limits = EngineConfig().step_limits(device)
    share = f"{EngineConfig.gpu_memory_utilization:.0%} of the GPU, less weights and a step"
    return {
        "device": device,
        "dtype": "bfloat16" if gpus or is_made_for_bfloat16() else "float32",
        "backend": "triton" if gpus else _cpu_backend(),
        "pool": share if gpus else cpu_pool_bytes(),
        "step": f"{limits.tokens:,} tokens, {limits.sequences} sequences",
        "model_folder": str(cache_folder()),
    }


def _model(config: EngineConfig) -> Facts:
    """Out of its headers and shapes: no weight is read."""
    from quire.models.causal_lm import CheckpointModel
    from quire.models.held import held_by_format
    from quire.models.pooling.open import open_pooling
    from quire.models.source import shapes
    from quire.ranks.rank_model import open_source
    from quire.runner.device import choose_device, choose_dtype

    device, progress = choose_device(config.device), sys.stderr.isatty()
    reads = open_pooling(config.model, config.task, config.load_format != "dummy", progress)
    if reads is not None:
        model: CheckpointModel = reads.shapes()
    else:
        model = shapes(open_source(config, device, progress).config)
    dtype = choose_dtype(config.dtype, model.config, device)
    held = held_by_format(model, dtype)
    return {
        "model": config.model,
        "architecture": model.config.architecture,
        "computes_in": str(dtype).removeprefix("torch."),
        "weights": sum(each.bytes for each in held.values()),
        "of_which": [
            f"{human_bytes(each.bytes)} {name}" + (f" ({each.matrices})" if each.matrices else "")
            for name, each in held.items()
        ],
    }


def _cpu_backend() -> str:
    try:
        import numba  # noqa: F401  # it may be there and not work, as with the newest Python
    except ImportError:
        return "cpu"
    return "numba"


def _shown(label: str, value: str | int | list[str] | None) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return human_bytes(value) if label in SIZES else str(value)
    return value or "not installed"
