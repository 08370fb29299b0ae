"""What a model declares of its KV: which layers store what, and how far back they look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVStream:
    """What one layer stores for one token, once: K is a stream, V another."""

    heads: int
    width: int


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV has the same shape and the same reach."""

    layers: tuple[int, ...]
    streams: tuple[KVStream, ...]
    window: int | None = None  # how many positions back they look, None: to the start
