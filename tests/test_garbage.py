"""Full collections wait until a run is over; all others go on."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from patience import PATIENCE_S
from tiny_llm import open_tiny, write_config

from quire import SamplingParams
from quire.engine.sequence import Request
from quire.gc_control import full_collections_held_off, nothing_is_garbage


@pytest.fixture(autouse=True)
def collections() -> Iterator[list[int]]:
    """The generations that were collected."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


class Node:
    """Refers to itself: only the collector can end it."""

    def __init__(self) -> None:
        self.itself = self


def alive(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def litter(kept: list[Node], count: int = 300_000) -> None:
    """More than what makes the collector go over everything."""
    kept += [Node() for _ in range(count)]


def test_the_oldest_are_not_gone_over(collections):
    with full_collections_held_off():
        litter([])
        assert {0, 1} == set(collections)
    litter([])
    assert 2 in collections


def test_what_is_young_is_collected():
    with full_collections_held_off():
        for _ in range(20_000):
            Node()
        assert alive(Node) < 10_000


def test_who_asks_gets_a_collection():
    node = Node()
    old = weakref.ref(node)
    del node
    with full_collections_held_off():
        gc.collect()
        assert old() is None


def test_nothing_is_different_afterwards():
    before = gc.get_threshold()
    with pytest.raises(KeyError), full_collections_held_off():
        raise KeyError
    with full_collections_held_off(), full_collections_held_off():
        pass
    assert gc.get_threshold() == before


def test_the_last_of_several_threads_puts_it_back():
    before = gc.get_threshold()
    entered, leave = threading.Event(), threading.Event()

    def hold_off() -> None:
        with full_collections_held_off():
            entered.set()
            leave.wait(PATIENCE_S)

    thread = threading.Thread(target=hold_off)
    with full_collections_held_off():
        thread.start()
        entered.wait(PATIENCE_S)
    assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold() != before
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


def test_what_somebody_sets_meanwhile_stays():
    before = gc.get_threshold()
    try:
        with full_collections_held_off():
            gc.set_threshold(900, 9, 9)
        assert gc.get_threshold() == (900, 9, 9)
    finally:
        gc.set_threshold(*before)


def test_generate_holds_them_off_and_leaves_no_requests_behind(tmp_path):
    gc.collect()
    thresholds, of_other_tests = [], alive(Request)
    with open_tiny(write_config(tmp_path), "cpu") as llm:
        before = gc.get_threshold()

        def watched(call):
            def noting(*args):
                thresholds.append(gc.get_threshold())
                return call(*args)

            return noting

        llm.engine.make_request = watched(llm.engine.make_request)
        llm.engine.step = watched(llm.engine.step)
        for _ in range(300):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert alive(Request) - of_other_tests < 200
    assert before not in thresholds and gc.get_threshold() == before


def test_what_is_imported_is_searched_neither_then_nor_later(collections):
    kept: list[Node] = []
    before = gc.get_freeze_count()
    with nothing_is_garbage():
        litter(kept)
    assert not collections and gc.isenabled()
    gc.collect()
    assert gc.get_freeze_count() - before >= len(kept)  # of what was collected, it is not a part
    litter([])
    assert 0 in collections


def test_a_process_of_an_engine_keeps_all_it_has():
    script = (
        "import gc, quire.gc_control as g; g.keep_for_good(); print(gc.get_freeze_count() > 999)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout == "True\n", told.stderr


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_program_that_imports_quire_has_its_collector_back(is_enabled):
    script = f"""
import gc
gc.{"enable" if is_enabled else "disable"}()
before = gc.get_freeze_count(), gc.get_stats()[2]["collections"]
from quire import LLM
assert (gc.get_freeze_count(), gc.get_stats()[2]["collections"]) == before
print(gc.isenabled())
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout == f"{is_enabled}\n", told.stderr
