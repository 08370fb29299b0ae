"""What all tests share: calm threads, GPU tests only where there is a GPU, the demo model."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from diagonal import left_out
from effort import examples
from gpu_lanes import WITHOUT_GPU_TESTS
from hypothesis import HealthCheck, settings
from patience import PATIENCE_S
from quick_interpreter import quicken

from quire.gc_control import nothing_is_garbage

# Both are read once, when torch is first imported. Threads that spin while they wait, or more of
# them than cores, make a small machine crawl as soon as anything else runs on it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Workers are started with what the process that deals out the tests has set for itself alone.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if "OMP_NUM_THREADS" not in os.environ or "QUIRE_TEST_THREADS" in os.environ:
    _threads = str(max(1, min(4, (os.cpu_count() or 1) // _workers)))
    os.environ["OMP_NUM_THREADS"] = os.environ["QUIRE_TEST_THREADS"] = _threads

# Triton decides when it is first imported, which other packages do too. Where there is a GPU, its
# kernels are tested there.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores interrupts, which some tests raise.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast an example is made or checked says nothing on a machine that has other things to do.
settings.register_profile(
    "patient",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests, and the libraries they import."""
    with nothing_is_garbage():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := [*left_out(items), *_without_a_gpu(items)]:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _without_a_gpu(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that need one, where there is none: to skip thousands takes seconds, too."""
    if not (gpu_tests := [item for item in items if item.get_closest_marker("gpu")]):
        return []
    for item in gpu_tests:
        is_missed = any(map(item.path.is_relative_to, WITHOUT_GPU_TESTS))
        assert not is_missed, f"{item.nodeid}: gpu_lanes.py says that its folder has no GPU tests"
    import torch

    return [] if torch.cuda.is_available() else gpu_tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from whole_files import WholeFiles

    return WholeFiles(config, log)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_searched_for_garbage_twice() -> None:
    """Thousands of tests and the libraries they import stay: a closing LLM, which collects its
    garbage, need not look through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _the_interpreter_of_triton_is_quick() -> None:
    quicken()


def pytest_sessionfinish() -> None:
    """Or else it would all count as leaked when the interpreter ends; before that, pytest itself
    searches for garbage several times."""
    atexit.register(gc.unfreeze)


# A tier's own deadlines, after which a block counts as missed: no answer changes by that, but which
# tier it came from does.
DEADLINES = [
    ("quire.kv.store", "ASK_DEADLINE_S"),
    ("quire.kv.loads", "SLOT_WAIT_S"),
    ("quire.kv.puts", "SLOT_WAIT_S"),
]


@pytest.fixture(autouse=True)
def _tiers_are_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missed because the machine is busy, unless a test asks for it."""
    for name, deadline in DEADLINES:
        if name in sys.modules:
            monkeypatch.setattr(f"{name}.{deadline}", PATIENCE_S)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache folder."""
    from quire.models.checkpoints import demo

    return Path(demo.fetch())
