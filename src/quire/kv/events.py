"""Events: the blocks that an engine's own tiers store and remove, for a router of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORT_KEY = 16  # bytes of a block's key that are told: enough to choose a replica by


@dataclass(frozen=True)
class BlockEvents:
    """Read in this order; no key is both in `removed` and in `stored`."""

    cleared: bool = False  # nothing that was told before holds any more
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()
