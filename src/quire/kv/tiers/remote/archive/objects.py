"""What packs are kept in: objects with names, on a mount or behind HTTP.

Calls may take for ever, and are made by threads that can be left behind. What goes wrong is an
OSError; an object that is not there is a FileNotFoundError, a full store a `StoreFull`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from quire.kv.tiers.remote.archive.pack import Span

Bytes = bytes | bytearray | memoryview


class StoreFull(OSError):
    """There is no room for what was to be written."""


class Listed(NamedTuple):
    name: str
    used_at: float  # seconds since the epoch; in the future while it is pinned


class Objects(ABC):
    """Names are a folder and a name in it, or a name alone. Called by several threads."""

    keeps_uses = False  # whether `touch` does anything

    @abstractmethod
    def check(self) -> None:
        """Raise unless the place is there and can be used."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """All objects in folders."""

    @abstractmethod
    def listed(self) -> Iterator[Listed]:
        """All objects in folders, and when each was last used or written."""

    @abstractmethod
    def read(self, name: str, spans: Sequence[Span]) -> Iterator[Bytes]:
        """The bytes of each span, which come in their order; fewer where the object ends."""

    @abstractmethod
    def write(self, name: str, data: Bytes, wanted: Callable[[], bool] = lambda: True) -> None:
        """Appears whole or not at all, and not if it is no longer `wanted` by then."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """It may be gone already."""

    def touch(self, name: str, until: float) -> None:
        """Count as used at this time, which may lie in the future."""
        return None

    def use_alike(self, name: str, other: str) -> None:
        """Count as used when the other was, and as pinned for as long."""
        return None

    def tidy(self) -> None:
        """Remove what writers that died have left."""
        return None
