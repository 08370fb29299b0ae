"""What a model caches, as it declares it: KV groups, their streams, and how they share a pool.

    declared        full: layers 5, 11, …   window of 1,024: layers 0 to 4, 6 to 10, …
    even_groups     so many layers a group that all blocks have nearly the same number of bytes

A block is room for a few tokens over all layers of one group. Blocks of all groups come from one
pool of equal rows, so memory goes wherever it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

REFERENCE_LEN = 1 << 14  # tokens of the sequence for which padding is weighed
MOST_WASTE = 1.05  # of that sequence's least bytes: more than this is not given for fewer tables


@dataclass(frozen=True)
class KVStream:
    """What a layer stores for a token: K is one stream, V another, a latent vector the only one."""

    heads: int
    width: int  # values of one head
    rank: int | None = None  # of a latent vector: so many of its values are V as well as K


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV has the same shape and the same reach."""

    layers: tuple[int, ...]
    streams: tuple[KVStream, ...]
    window: int | None = None  # positions that a token sees, its own included; None: all

    @classmethod
    def keys_and_values(
        cls, layers: Iterable[int], heads: int, width: int, window: int | None = None
    ) -> KVGroup:
        """Layers that store K and V of the same width."""
        stream = KVStream(heads, width)
        return cls(tuple(layers), (stream, stream), window)

    @property
    def layer_values(self) -> int:
        """Values that one layer stores for a token."""
        return sum(stream.heads * stream.width for stream in self.streams)

    def held_tokens(self, length: int) -> int:
        """Tokens of a sequence of this length whose KV is still looked at."""
        return length if self.window is None else min(length, self.window)


def even_groups(declared: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The declared groups cut into groups whose blocks fill rows of one size with little padding.

    The fewest tables whose waste over the best cut stays below a few per cent; what a model
    declares determines the result, since images in every tier have this shape.
    """
    cuts = [
        (_bytes_held(declared, row), _num_groups(declared, row), row) for row in _rows(declared)
    ]
    least = min(held for held, _, _ in cuts)
    _, _, row = min((n, held, row) for held, n, row in cuts if held <= MOST_WASTE * least)
    return tuple(part for group in declared for part in _cut(group, _parts(group, row)))


def without_windows(declared: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The declared layers as if each kept all its tokens: one group for each shape of streams."""
    layers: dict[tuple[KVStream, ...], list[int]] = {}
    for group in declared:
        layers.setdefault(group.streams, []).extend(group.layers)
    return tuple(KVGroup(tuple(sorted(found)), streams) for streams, found in layers.items())


def _rows(declared: Sequence[KVGroup]) -> set[int]:
    """Sizes of a row, in values a token, that whole layers of some group fill."""
    widest = max(group.layer_values for group in declared)
    sizes = {n * g.layer_values for g in declared for n in range(1, len(g.layers) + 1)}
    return {size for size in sizes if size >= widest}


def _parts(group: KVGroup, row: int) -> int:
    return -(-len(group.layers) // (row // group.layer_values))


def _num_groups(declared: Sequence[KVGroup], row: int) -> int:
    return sum(_parts(group, row) for group in declared)


def _bytes_held(declared: Sequence[KVGroup], row: int) -> int:
    return row * sum(_parts(g, row) * g.held_tokens(REFERENCE_LEN) for g in declared)


def _cut(group: KVGroup, parts: int) -> Iterator[KVGroup]:
    """Its layers in order, dealt out as evenly as can be."""
    least, more = divmod(len(group.layers), parts)
    start = 0
    for part in range(parts):
        stop = start + least + (part < more)
        yield replace(group, layers=group.layers[start:stop])
        start = stop
