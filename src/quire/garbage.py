"""Python's garbage collector and what lives as long as an engine.

Now and then a collection goes over every object there is. With torch imported these are hundreds of
thousands: a tenth of a second or two in which no token is drawn, and nearly all of them are there
to stay. So the collector is told to leave alone what was there before; it still sees what is new.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_for_good() -> None:
    """Of a process that does nothing else: all there is now stays."""
    gc.collect()
    gc.freeze()


@contextmanager
def older_left_alone() -> Iterator[None]:
    """While somebody else's process works for us; nothing is different afterwards."""
    if gc.get_freeze_count():  # it keeps something itself, and would lose that
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
