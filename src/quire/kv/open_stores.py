"""The stores that are open in this process; its end closes those that are still open then.

Threads that are still copying when the interpreter goes would take the process down with them:
Python ends them in the middle of a call, which is fatal inside of torch.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

EXIT_S = 5.0  # to write what waits, all stores together


class OpenStore(Protocol):
    """What this module asks of a store."""

    def close(self, timeout: float) -> None: ...

    def disown(self) -> None:
        """This process is a child of the one that opened the store, and has none of its threads."""


# Weak: to be open keeps no store alive, but what is under way in it does (see `OpenHandles`).
_stores: weakref.WeakSet[OpenStore] = weakref.WeakSet()


def add(store: OpenStore) -> None:
    _stores.add(store)
    # Registered again, the hook is the first one to run: before those that close and remove what
    # was there before this store.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def discard(store: OpenStore) -> None:
    _stores.discard(store)


def _close_all() -> None:
    until = time.monotonic() + EXIT_S
    for store in list(_stores):
        store.close(max(0.0, until - time.monotonic()))


def _disown_all() -> None:
    for store in list(_stores):
        store.disown()
    _stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
