"""In the place of `Tiering`, where there are no tiers below the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from quire.engine.schedule.prefixes import Prefixes
from quire.engine.sequence import Sequence
from quire.kv.block_log import BlockLog
from quire.kv.foreground import Foreground
from quire.kv.table import BlockCopy


class TierLookup(Enum):
    """What the tiers have for a sequence that is about to be computed."""

    NOTHING = auto()  # compute it
    ASKED = auto()  # a far tier has not answered yet
    LOADING = auto()  # it has its blocks, and they are being filled


class NoTiers:
    """Has nothing, keeps nothing and is never waited for."""

    loading: Mapping[Sequence, object] = MappingProxyType({})
    rates = None

    @property
    def foreground(self) -> Foreground:
        return Foreground()

    def begin(
        self, sequence: Sequence, limit: int, step: int, copies: list[BlockCopy]
    ) -> TierLookup:
        return TierLookup.NOTHING

    def places(self, sequence: Sequence) -> list[str]:
        return []

    def take_loaded(self) -> list[tuple[Sequence, Any]]:
        return []

    def begun_since(self, step: int) -> list[Sequence]:
        return []

    def abandon(self, sequence: Sequence) -> None: ...

    def prefetch(self, waiting: Iterable[Sequence], prefixes: Prefixes) -> None: ...

    def offer(self, sequence: Sequence, first: int, end: int) -> None: ...

    def offer_end(self, sequence: Sequence) -> None: ...

    def note_use(self, sequence: Sequence) -> None: ...

    def tell_uses(self) -> None: ...

    def copied_blocks(self) -> list[int]:
        return []

    def wait(self, timeout: float) -> None: ...

    def poll(self) -> None: ...

    def wait_for_copies(self, timeout: float) -> None: ...

    def clear_host(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}

    def store_stats(self) -> dict[str, Any]:
        return {}

    def slot_states(self) -> dict[str, Any]:
        return {}

    def publish_events(self, log: BlockLog) -> None: ...


NO_TIERS = NoTiers()
