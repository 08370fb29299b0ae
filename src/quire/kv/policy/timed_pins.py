"""Blocks that are to stay for a time: pins of a policy that end by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.kv.policy.protocol import Policy

MOST_SHARE = 0.5  # of a tier's room: what is pinned must not keep out all else


class TimedPins:
    """Called under the tier's lock, as its policy is."""

    def __init__(self, policy: Policy[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Pin these resident blocks, as far as there is room; how many of them stay."""
        self.expire()
        until, count = self._clock() + seconds, 0
        for key in keys:
            if key not in self._until:
                if len(self._until) >= MOST_SHARE * self._policy.capacity:
                    break
                self._policy.pin(key)
            self._until[key] = max(until, self._until.get(key, 0.0))
            count += 1
        return count

    def expire(self) -> None:
        """Before anything is evicted: let go of blocks whose time is over."""
        if self._until:
            now = self._clock()
            for key in [key for key, until in self._until.items() if until <= now]:
                self.forget(key)

    def forget(self, key: bytes) -> None:
        """Before a block is removed for another reason."""
        if self._until.pop(key, None) is not None:
            self._policy.unpin(key)
