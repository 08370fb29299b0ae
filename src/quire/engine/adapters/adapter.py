"""An adapter, known by its contents: where it is, and which requests are computed with it."""

from __future__ import annotations

from typing import Protocol

from quire.runner.plan import AdapterInfo


class AdapterRunner(Protocol):
    """What is asked of the object that computes the steps."""

    def read_adapter(self, path: str) -> AdapterInfo:
        """Read a folder into host memory; in a thread of its own."""

    def forget_adapter(self, fingerprint: str) -> None:
        """Its copy in host memory goes."""

    def load_adapter(self, fingerprint: str, slot: int) -> None:
        """Copy it from host memory into a slot: after the steps that were launched before, and
        before those that are launched later."""


class Adapter:
    """Contents with one fingerprint. There is one object of each, whatever names it has."""

    def __init__(self, info: AdapterInfo) -> None:
        self.fingerprint = info.fingerprint
        self.is_in_host = False
        self.is_unloaded = True  # no name leads to it: it goes with its last request
        self.slot: int | None = None
        self.num_passes = 0  # left to it, see `AdapterSlots`
        self.gave_way_with = -1  # the number of its first request when its slot was exchanged
        self.last_used = 0
        self.requests: dict[int, None] = {}  # the numbers of those that have not ended, in order

    @property
    def is_wanted(self) -> bool:
        return bool(self.requests) or not self.is_unloaded

    @property
    def has_given_way(self) -> bool:
        """Whether the first of its requests has lost its slot already, see `SlotExchange`."""
        return next(iter(self.requests), None) == self.gave_way_with

    @property
    def need(self) -> tuple[bool, int]:
        """The less it is needed, the smaller: an adapter without requests by its last use, one
        with requests by how long the first of them has waited."""
        if not self.requests:
            return False, self.last_used
        return True, -next(iter(self.requests))
