"""What a tier asks of its policy, whatever the answers are made from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


def ignore(key: object) -> None:
    pass


class Policy(Protocol[K]):
    """Names of the blocks in a tier with room for `capacity`; the bytes are the tier's business.

    A block can be found only through the blocks before it, so one with a resident child stays, and
    what leaves is always the end of some chain. Calls come from one thread at a time.

    No tenant holds more than its share: one that would makes room by blocks of its own, in the
    order in which any block would have to leave. All blocks of a chain are one tenant's. With a
    share of 1 tenants are not told apart.
    """

    capacity: int
    tenant_share: float  # of the capacity
    on_evict: Callable[[K], None]  # told of every block that has to leave

    def __len__(self) -> int:
        """How many blocks are resident."""

    def __contains__(self, key: K) -> bool: ...

    def use(self, keys: Sequence[K]) -> None:
        """A request asks for these blocks, from its first to its last; once for each request.

        Those that are not resident are remembered too: it counts when they are asked for again.
        """

    def restore(self, keys: Sequence[K], parents: Sequence[K], tenants: Sequence[Hashable]) -> None:
        """What a tier that outlives the process held before, the least recently used first.

        Before anything else, and no more than there is room for. A block is as recently used as
        those behind it. What a tenant has beyond its share
        has to leave at once.
        """

    def offer(self, key: K, parent: K | None, tenant: Hashable = None) -> bool:
        """Whether the tier is to hold this block; from now on it is resident.

        With room, every block is taken, but for those behind a block that had to leave or was
        turned away. Without, another has to leave, or, if its tenant has its share, one of that
        tenant's. An unknown parent makes the block the first of a chain: it may be in
        another tier, or on its way.
        """

    def has_its_share(self, tenant: Hashable) -> bool:
        """Whether this tenant may hold no more, but in place of what it holds."""

    def pin(self, key: K) -> None:
        """This block is being read or written and must stay; pins are counted."""

    def unpin(self, key: K) -> None: ...

    def remove(self, key: K) -> None:
        """The block is lost, pinned or not. Those behind it stay: it may come again."""

    @property
    def num_ghosts(self) -> int:
        """How many blocks are remembered that are not resident."""
