"""The tests that need a GPU, in several processes that share it: `make test-gpu` loads this plugin.

Files whose tests share a model run first, each in one process. The files of `tests/kernels`, which
have many small tests, are divided, and fill up the processes at the end.

A kernel that reads outside its tensors breaks the CUDA context of its process, in which every later
test would fail. Therefore the process ends, and xdist starts another one for the rest. If a test
hangs, pytest prints its stack and ends the process (`faulthandler_timeout`).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
KERNELS = TESTS / "kernels"
PART = 24  # tests of a file of kernels that one process takes at a time

# These tests import clients of the server, which a machine for GPU tests need not have.
WITHOUT_GPU_TESTS = [
    TESTS / folder for folder in ("api/server", "fuzz", "replicas", "security", "soak")
]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in WITHOUT_GPU_TESTS else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.is_relative_to(KERNELS))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from whole_files import WholeFiles

    class Lanes(WholeFiles):
        def schedule(self) -> None:
            if self.collection is None:
                self._parts = parts_of(next(iter(self.registered_collections.values())))
            else:  # a new process begins when it has two units: it runs a test if it knows the next
                super().schedule()
            super().schedule()

        def _reschedule(self, node: Any) -> None:
            """A process that has not said yet which tests it found gets its work when it does:
            xdist would note some for it, fail to send them, and pass over that error."""
            if node in self.registered_collections:
                super()._reschedule(node)

        def _split_scope(self, nodeid: str) -> str:
            return self._parts[nodeid]

        def _best_for(self, node: Any) -> str:
            """A whole file, or else a part of the file that the process has compiled kernels of."""
            first = next(iter(self.workqueue))
            return super()._best_for(node) if is_kernels(first) else first

        def remove_node(self, node: Any) -> str | None:
            """The test that ended its process counts as done: xdist 3.8 would try it again."""
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            if not left:
                return super().remove_node(node)
            unit, crashed = left[0]
            unit[crashed] = True
            rest = {s: u for s, u in self.assigned_work[node].items() if not all(u.values())}
            self.assigned_work[node] = {}
            super().remove_node(node)
            self.workqueue.update(rest)
            for other in self.nodes:
                self._reschedule(other)
            return crashed

    return Lanes(config, log)


def is_kernels(test: str) -> bool:
    return test.startswith("tests/kernels/")


def parts_of(tests: list[str]) -> dict[str, str]:
    """The unit that each test belongs to: its file, or a part of it."""
    seen: Counter[str] = Counter()
    parts = {}
    for test in tests:
        file = test.partition("::")[0]
        parts[test] = f"{file}/{seen[file] // PART}" if is_kernels(test) else file
        seen[file] += 1
    return parts


@pytest.hookimpl(wrapper=True, trylast=True)  # within the time that faulthandler_timeout gives
def pytest_runtest_protocol() -> Generator[None, object, object]:
    result = yield
    if "PYTEST_XDIST_WORKER" in os.environ and context_is_broken():
        os._exit(1)  # the test's report is sent; an ordinary exit would use the broken context
    return result


def context_is_broken() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
