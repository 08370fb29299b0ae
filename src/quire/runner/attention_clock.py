"""How long attention over the pages takes, from a step now and then.

Of one step every so often, each layer's attention is timed: on a GPU by two events that are read
when they have passed, so that nothing waits for them. A replay cannot be looked into, so a step
that would be replayed is now and then launched piece by piece; more rarely, as that is slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages
from quire.kernels.plain import Rotation
from quire.kernels.scoring import Scoring

Attended = TypeVar("Attended", Tensor, Tensor | None)

EVERY_S = 1.0
REPLAYED_EVERY_S = 10.0  # a step without its graph takes some milliseconds more


class AttentionClock:
    """`note` is told the seconds of each layer that was timed."""

    def __init__(
        self,
        device: torch.device,
        note: Callable[[float], None],
        every: float = EVERY_S,
        replayed_every: float = REPLAYED_EVERY_S,
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._note = note
        self._every, self._replayed_every = every, replayed_every
        self._next = 0.0
        self._next_replayed = time.monotonic() + replayed_every
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def over(self, backend: Backend) -> Backend:
        """The backend for one step: most often itself, and now and then one that is timed."""
        now = time.monotonic()
        if now < self._next:
            return backend
        self._read_events()
        self._next = now + self._every
        return _Timed(backend, self)

    def instead_of_replay(self, backend: Backend) -> Backend | None:
        """A backend that is timed, for a step that would be replayed; most often none."""
        now = time.monotonic()
        if now < self._next_replayed:
            return None
        self._next_replayed = now + self._replayed_every
        self._read_events()
        return _Timed(backend, self)

    def time(self, attend: Callable[[], Attended]) -> Attended:
        """What `attend` returns; where that is None, nothing was computed, and no time is noted."""
        if not self._on_gpu:
            started = time.perf_counter()
            out = attend()
            if out is not None:
                self._note(time.perf_counter() - started)
            return out
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        out = attend()
        after.record()
        if out is not None:
            self._events.append((before, after))
        return out

    def _read_events(self) -> None:
        """Read the last step's events, which are over by now; those that are not are left out."""
        events, self._events = self._events, []
        for before, after in events:
            if after.query():
                self._note(before.elapsed_time(after) / 1000)


class _Timed:
    """A backend whose attention is timed."""

    def __init__(self, backend: Backend, clock: AttentionClock) -> None:
        self._backend = backend
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        attention = self._backend.paged_attention
        return self._clock.time(lambda: attention(q, pages, batch, scoring))

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> Tensor | None:
        """Where both are one launch, they are timed together."""
        attention = self._backend.rotate_and_attend
        return self._clock.time(lambda: attention(qkv, rotation, pages, batch, scoring))
