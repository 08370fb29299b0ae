"""What an operator does to the cache: pin a prefix for a time, delete, list what is held.

Nothing here waits: each call returns a handle, and a thread goes from tier to tier. `counts` has
how many blocks of each, None where a tier cannot do it or could not be reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Protocol

from quire.checks import shown
from quire.errors import KVError
from quire.kv.arguments import TokenIds
from quire.kv.hit_rule import Window
from quire.kv.image import NO_TENANT, BlockName, HeldBlock
from quire.kv.job_queue import Handle, JobQueue, OpenHandles
from quire.kv.keys import group_key, tenant_tag
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.tier import Tier

AnyTier = HostTier | Tier
MOST_SECONDS = 100 * 365 * 86_400.0  # of a pin: file systems know no later times
FLUSH_S = 30.0  # for what is being put when something is pinned or deleted


class Control(Handle):
    """Something that is done in every tier; when it is over, `counts` has how many blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int | None] = {}


class Listing(Handle):
    """When it is over, `blocks` has by tier how many blocks there are of each root.

    A root stands for a namespace and a salt: `root_of` in `CacheControl` tells which.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, dict[str, int] | None] = {}


class Controlled(Protocol):
    """What is asked of a store."""

    host: HostTier
    tiers: list[Tier]
    windows: tuple[Window, ...]

    def root(self, salt: str) -> bytes: ...

    def names(self, token_ids: TokenIds, salt: str) -> list[BlockName]: ...

    def check_open(self) -> None:
        """Raise a KVError if it is closed."""

    def settle(self, timeout: float) -> bool:
        """Wait until all that was put is where it is to be; False if that takes longer."""


class CacheControl:
    """Of one store."""

    def __init__(self, store: Controlled) -> None:
        self._store = store
        self._jobs = JobQueue("control")
        self._handles = OpenHandles(self)

    def root_of(self, salt: str) -> str:
        """By which listings know what has this salt in the store's namespace."""
        return self._store.root(salt)[:8].hex()

    def pin(self, token_ids: TokenIds, seconds: float, salt: str = "") -> Control:
        """Keep what tiers hold of this prefix for so long, whatever else they are offered.

        What is pinned takes up to half of host memory, of a disk, and of an archive's quota. After
        a restart the first two have no pins. A bucket, Redis and Mooncake cannot pin.
        """
        if not isinstance(seconds, Real) or not 0 < seconds <= MOST_SECONDS:
            raise KVError(
                f"To pin for {shown(seconds)} seconds makes no sense; give a time above 0 and "
                "below a century."
            )
        keys = self._keys(token_ids, salt)
        return self._in_every_tier(lambda tier: tier.pin(keys, seconds))

    def delete(self, token_ids: TokenIds, salt: str = "") -> Control:
        """Delete this prefix, and all that is known to continue it.

        What continues it in a remote store alone stays there, and is not found without it.
        """
        keys = self._keys(token_ids, salt)

        def find() -> Sequence[bytes]:
            return list(dict.fromkeys(keys + _behind(keys, self._held())))

        return self._delete(find)

    def delete_tenant(self, tenant: str, *salts: str) -> Control:
        """Delete all that was put for a tenant (a salt is one, too), and under these `salts`.

        Redis and Mooncake cannot tell whose a block is.
        """
        roots = {self._store.root(salt) for salt in (tenant, *salts)}
        tag = tenant_tag(tenant)

        def find() -> Sequence[bytes]:
            held = self._held()
            found = [block for block in held if block.tenant == tag or block.root in roots]
            roots.update(block.root for block in found)
            return [block.key for block in found]

        return self._delete(find, roots, tag)

    def held(self) -> Listing:
        """List what is held."""
        self._store.check_open()
        listing = Listing()
        self._handles.follow(listing)

        def look() -> None:
            try:
                for tier in self._tiers():
                    listing.blocks[tier.name] = tier.blocks_by_root()
            finally:
                listing.end()

        self._jobs.submit(look)
        return listing

    def close(self, timeout: float) -> None:
        self._jobs.close(timeout)
        self._handles.end_all()

    def _delete(
        self,
        find: Callable[[], Sequence[bytes]],
        roots: set[bytes] | None = None,
        tenant: bytes = NO_TENANT,
    ) -> Control:
        """Below all, the nearest first, so that nothing is fetched from below in the meantime."""
        found: list[bytes] = []

        def delete(tier: AnyTier) -> int | None:
            if tier is self._store.host:
                found.extend(find())
            if isinstance(tier, HostTier):
                return tier.remove(found)
            if roots is not None and tier.held() is None:
                return tier.delete_roots(sorted(roots), tenant)
            return tier.delete(found)

        return self._in_every_tier(delete)

    def _in_every_tier(self, do: Callable[[AnyTier], int | None]) -> Control:
        self._store.check_open()
        control = Control()
        self._handles.follow(control)

        def each() -> None:
            try:
                self._store.settle(FLUSH_S)  # what is being put is there when it is looked for
                for tier in self._tiers():
                    control.counts[tier.name] = do(tier)
            finally:
                control.end()

        self._jobs.submit(each)
        return control

    def _tiers(self) -> list[AnyTier]:
        return [self._store.host, *self._store.tiers]

    def _held(self) -> list[HeldBlock]:
        return [block for tier in self._tiers() for block in tier.held() or ()]

    def _keys(self, token_ids: TokenIds, salt: str) -> list[bytes]:
        """Of all full blocks, in every KV group."""
        chain = [name.key for name in self._store.names(token_ids, salt)]
        return [group_key(key, group) for group in range(len(self._store.windows)) for key in chain]


def _behind(keys: Sequence[bytes], held: Sequence[HeldBlock]) -> list[bytes]:
    """The keys of all blocks whose chain leads through one of these."""
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for block in held:
        children[block.parent].append(block.key)
    found: dict[bytes, None] = {}
    reached = list(keys)
    while reached:
        for child in children.pop(reached.pop(), ()):
            found[child] = None
            reached.append(child)
    return list(found)
