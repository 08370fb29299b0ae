"""Python's garbage collector and what lives as long as an engine.

Now and then a collection goes over every object there is. With torch imported these are hundreds of
thousands: a tenth of a second or two in which no token is drawn, and nearly all of them are there
to stay.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1

_lock = threading.Lock()
_num_holding_off = 0
_usual = gc.get_threshold()


def keep_for_good() -> None:
    """For a process that does nothing else: all there is now stays, and is not searched again."""
    gc.collect()
    gc.freeze()


def search_no_more() -> None:
    """For a process that ends: Python would go over all there is once more, and free it."""
    gc.disable()
    gc.freeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """While modules are imported: what they make stays. With torch, to search it again and again
    takes a tenth of the time that the imports do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """For a process that begins: what is imported here is never searched, later neither."""
    with no_collections():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def full_collections_held_off() -> Iterator[None]:
    """While an engine works. What is young is collected all the same, and a
    call of `gc.collect` still collects everything."""
    global _num_holding_off, _usual
    with _lock:
        if _num_holding_off == 0:
            _usual = gc.get_threshold()
            gc.set_threshold(*_usual[:2], _NEVER)
        _num_holding_off += 1
    try:
        yield
    finally:
        with _lock:
            _num_holding_off -= 1
            if _num_holding_off == 0 and gc.get_threshold()[2] == _NEVER:  # else set anew
                gc.set_threshold(*_usual)
