"""What the engine asks of a store: `KVStore` answers with bytes and threads, the simulator's
`TimedStore` with the times that these would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.kv.block_log import BlockLog
from quire.kv.foreground import Foreground
from quire.kv.grouped_match import GroupedMatch, OnDevice, nothing_there
from quire.kv.hit_rule import Window
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle
from quire.kv.loads import Load
from quire.kv.puts import Names, Put
from quire.kv.rates import Rates
from quire.kv.tier_match import TierMatch


class HostMemory(Protocol):
    """The nearest tier, through which all others are reached."""

    @property
    def name(self) -> str: ...

    def clear(self) -> int:
        """Forget every image that no load holds; returns how many there were."""


class Handles(Protocol):
    """The loads, puts and questions that are under way."""

    def wait_for_any(self, timeout: float) -> None:
        """Until one of them has ended since the last call."""

    def of(self, *kinds: type[Handle]) -> list[Handle]: ...


class Store(Protocol):
    """The tiers below the device. No call but `leave_device` and `close` waits."""

    @property
    def host(self) -> HostMemory: ...

    @property
    def handles(self) -> Handles: ...

    @property
    def rates(self) -> Rates: ...

    @property
    def foreground(self) -> Foreground: ...

    def root(self, salt: str) -> bytes:
        """The key that the first block of every prompt with this salt is chained to."""

    def may_have(self, key: bytes) -> bool:
        """Whether some tier may have this block; if none has, none is asked for what follows."""

    def match_names(self, names: Sequence[BlockName], patience: float | None = None) -> TierMatch:
        """Which tier has each block, from the first on."""

    def match_groups(
        self,
        windows: Sequence[Window],
        names: Sequence[BlockName],
        first: int = 0,
        reached: int = 0,
        on_device: OnDevice = nothing_there,
        patience: float | None = None,
    ) -> GroupedMatch:
        """Which tier has each block of several KV groups, behind what the device has."""

    def put_names(self, names: Names, blocks: Sequence[int], *, is_computed: bool = False) -> Put:
        """Keep what `blocks` of the device hold."""

    def withdraw(self, load: Load) -> Handle:
        """Cancel a load; its blocks are free when the handle is over."""

    def prefetch(self, names: Sequence[BlockName]) -> None:
        """Bring blocks of lower tiers into host memory."""

    def use(
        self,
        keys: Sequence[bytes],
        parent: bytes = b"",
        behind: Sequence[bytes] = (),
        of_groups: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        """A request asked for these blocks, and for those with the tokens `behind` `parent`."""

    def leave_device(self, timeout: float) -> bool:
        """Wait until no copy touches the device's blocks; False if that takes longer."""

    def publish_events(self, log: BlockLog) -> None:
        """Write into `log` which blocks are held here, and what becomes of them."""

    def stats(self) -> dict[str, Any]: ...
    def slot_states(self) -> dict[str, npt.NDArray[np.uint8]]: ...
    def close(self) -> None: ...
