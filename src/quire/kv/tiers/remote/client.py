"""What a remote store has to offer, in its own language; the tier does the rest.

A value is a header and an image, in two places of the caller's memory and in one of the store. A
call ends by its deadline. What goes wrong on the way is raised, as `OSError` or `ClientError`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.kv.tiers.remote.deadline import Deadline


class ClientError(Exception):
    """The store answered, but not what it should."""


@dataclass(frozen=True, slots=True)
class Value:
    """Where the two parts of a value are, or are to go."""

    head: memoryview
    image: memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.image)


@dataclass(frozen=True, slots=True)
class ValueShape:
    """How long values are, and how many of them one call moves at most."""

    head_bytes: int
    image_bytes: int  # the most
    batch: int
    others: tuple[int, ...] = ()  # that images of some KV groups have instead

    @property
    def value_bytes(self) -> int:
        return self.head_bytes + self.image_bytes

    def is_length(self, count: object) -> bool:
        """Whether a value can have so many bytes."""
        return count == self.value_bytes or any(
            count == self.head_bytes + size for size in self.others
        )


class Connector(ABC):
    """Makes connections to one store. `connect` is called by one thread, the rest by any."""

    connect_seconds: float  # the most that `connect` takes, but for looking up a name

    def __init__(self) -> None:
        self.round_trips = 0  # how often a store was waited for
        self._count_lock = threading.Lock()
        self.wants_connect: Callable[[], None] = lambda: None  # called when something is missing

    def count_round_trip(self) -> None:
        with self._count_lock:
            self.round_trips += 1

    @abstractmethod
    def connect(self) -> None:
        """Make the connections that are missing and see that the store answers."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; a `connect` that is under way ends soon."""


class Client(Connector):
    """One store of values by their keys, whose calls any number of threads may make."""

    @abstractmethod
    def exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]: ...

    @abstractmethod
    def fetch(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, int]]:
        """Fill `values`; as they come, the index of each and how many bytes the store had for it.

        Only a value of the right length is there to be read.
        """

    @abstractmethod
    def store(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, str]]:
        """As the answers come, the index of each value and why the store did not take it, or ""."""

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None: ...

    # Control: None where a store cannot do it.

    def remove(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete these, which are right and not wanted any more."""
        self.delete(keys, deadline)

    def pin(self, keys: Sequence[str], until: float, deadline: Deadline) -> int | None:
        """Keep these until then (seconds since the epoch); how many there are."""
        return None

    def blocks_by_root(self) -> dict[str, int] | None:
        """By the first 16 hex digits of roots."""
        return None

    def remove_roots(self, roots: Sequence[bytes], deadline: Deadline) -> int | None:
        """Delete all values of these roots; how many there were."""
        return None
