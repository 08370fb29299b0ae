"""The processes that share the tests leave each other the cores."""

from __future__ import annotations

import os

import pytest


def test_all_workers_together_have_no_more_threads_than_there_are_cores() -> None:
    if "QUIRE_TEST_THREADS" not in os.environ:
        pytest.skip("The environment of the tests sets OMP_NUM_THREADS.")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert workers * int(os.environ["OMP_NUM_THREADS"]) <= max(workers, os.cpu_count() or 1)
