"""Collections go over what is new, and afterwards over all again."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
from tiny_llm import open_tiny, write_config

from quire.garbage import older_left_alone


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    gc.unfreeze()  # what all tests share keeps everything


class Node:
    """Refers to itself: only the collector can end it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_older_is_left_alone_and_what_is_new_is_not():
    old = weakref.ref(Node())
    with older_left_alone():
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None and gc.get_freeze_count() == 0


def test_nothing_is_different_after_an_error():
    with pytest.raises(KeyError), older_left_alone():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_keeps_stays_kept():
    gc.freeze()
    try:
        kept = gc.get_freeze_count()
        with older_left_alone(), older_left_alone():
            pass
        assert gc.get_freeze_count() >= kept
    finally:
        gc.unfreeze()


def test_generate_leaves_nothing_behind(tmp_path):
    kept = []
    with open_tiny(write_config(tmp_path), "cpu") as llm:
        step = llm.engine.step

        def watched():
            kept.append(gc.get_freeze_count())
            return step()

        llm.engine.step = watched
        llm.generate([[1, 2, 3]], use_tqdm=False)
    assert kept and all(kept) and gc.get_freeze_count() == 0


def test_a_process_of_an_engine_keeps_all_it_has():
    script = "import gc, quire.garbage as g; g.keep_for_good(); print(gc.get_freeze_count() > 999)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout == "True\n", told.stderr
