"""Fuzzers: each is a module here with `run(seed, count)`, which raises when something is wrong.

`FULL` of a module is how many cases `make soak` wants of it, `SMALL` how many each run of the tests
does. The same seed and count are the same cases. By hand: `PYTHONPATH=tests python -m fuzz NAME`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

FULL, SMALL = 4_000, 400  # for a module that does not say


def fuzzers() -> dict[str, ModuleType]:
    """Every module that can `run`, by name."""
    names = [each.name for each in pkgutil.iter_modules(__path__) if each.name[0] != "_"]
    modules = {name: importlib.import_module(f"fuzz.{name}") for name in names if is_module(name)}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


def is_module(name: str) -> bool:
    """Not one of the tests of the fuzzers themselves."""
    return not name.startswith("test_")


def full(module: ModuleType) -> int:
    return int(getattr(module, "FULL", FULL))


def small(module: ModuleType) -> int:
    return int(getattr(module, "SMALL", SMALL))
