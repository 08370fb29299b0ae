"""Which replicas each deployment has, as this process knows it; told by a thread of Ray's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

Listener = Callable[[frozenset[str]], None]

_lock = threading.Lock()
_known: dict[str, frozenset[str]] = {}
_listeners: dict[str, list[Listener]] = {}


class ReplicaGone(Exception):
    """The replica that a call was for is not there any more."""


def tell(deployment: str, replicas: Iterable[str]) -> None:
    with _lock:
        known = _known[deployment] = frozenset(replicas)
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener(known)


def watch(deployment: str, listener: Listener) -> None:
    """Have `listener` called at every change, in some thread; and now, if something is known."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)
        known = _known.get(deployment)
    if known is not None:
        listener(known)
