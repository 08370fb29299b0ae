"""Between the scheduler and the store: what is loaded before it is computed, and what is kept.

A waiting sequence whose prefix goes on in the tiers, behind what the device has, gets its blocks
and waits a little longer while they are filled; others are computed meanwhile. Blocks that a step
has filled are offered to the tiers. Both own the blocks they copy until the copy is over, whatever
becomes of the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from quire.engine.schedule.no_tiers import TierLookup
from quire.engine.schedule.prefill_rate import PREFILL
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.sequence import Sequence
from quire.kv.block_log import BlockLog
from quire.kv.foreground import Foreground
from quire.kv.grouped_table import Table
from quire.kv.image import BlockName
from quire.kv.index import Node, find_key
from quire.kv.job_queue import Handle
from quire.kv.keys import block_names, chain_keys, tenant_tag
from quire.kv.loads import Load
from quire.kv.prefix import PrefixCache
from quire.kv.puts import Names, Put
from quire.kv.rates import Rates
from quire.kv.store_protocol import Store
from quire.kv.table import BlockCopy
from quire.kv.tier_match import TierMatch

LEAVE_DEVICE_S = 30.0
HANDED_OVER_S = 2.0  # for a store to find what another engine has just put there
BLOCKS_TO_TRY, TOKENS_TO_TRY = 16, 256  # whichever is less, but for one block
FEW_BLOCKS = 64  # copies may hold so many, or half of the pool

H = TypeVar("H", bound=Handle)
T = TypeVar("T")


class Match(Protocol):
    """What was found in the tiers for a sequence that waits."""

    def drop(self) -> None: ...


@dataclass
class Loading:
    load: Load
    step: int  # in whose plan it was begun


@dataclass
class ChainLoading(Loading):
    match: TierMatch
    num_device: int  # blocks in front of those that are loaded


@dataclass
class Loaded:
    """What has come from the tiers for a sequence, whose table holds it now."""

    places: list[str]  # the tier of each block of tokens, in front of which the device had all
    num_blocks: int


class Tiering:
    """For models with one KV group without a window; `GroupedTiering` is for all others."""

    def __init__(self, store: Store, cache: PrefixCache) -> None:
        self.store = store
        self.cache = cache
        self.loading: dict[Sequence, Loading] = {}
        self.tokens_by_tier: Counter[str] = Counter()
        self.num_not_offered = 0  # blocks, because too many were being copied
        self._matches: dict[Sequence, Match] = {}  # of those that wait, to be loaded or dropped
        self._puts: list[tuple[Put, list[int]]] = []
        self._abandoned: list[tuple[Handle, Table]] = []
        self._uses: list[tuple[Sequence, list[Node], list[bytes]]] = []  # noted, not told yet

    @property
    def rates(self) -> Rates:
        return self.store.rates

    @property
    def foreground(self) -> Foreground:
        return self.store.foreground

    # --- loading ------------------------------------------------------------------------------

    def begin(
        self, sequence: Sequence, limit: int, step: int, copies: list[BlockCopy]
    ) -> TierLookup:
        """Look for what comes behind `sequence.nodes`, up to `limit` tokens, and begin to load it.

        The caller has seen to it that all its tokens fit. `copies`: what is copied before the step.
        """
        if self._copies_from_free(copies):
            return TierLookup.ASKED
        match = self._matches.get(sequence)
        if match is None:
            if not self._may_be_there(sequence, limit):
                return TierLookup.NOTHING
            names = self._names_behind(sequence, limit)
            patience = HANDED_OVER_S if sequence.request.is_handed_over else None
            match = self._matches[sequence] = self.store.match_names(names, patience)
        assert isinstance(match, TierMatch)
        if not match.ready():
            return TierLookup.ASKED
        del self._matches[sequence]
        if match.names[:1] and match.names[0].parent != self._last_key(sequence):
            match.drop()  # the device has more, or less, of its prefix than when it was asked
            return self.begin(sequence, limit, step, copies)
        count = self._worth_loading(sequence, match)
        if count == 0:
            match.drop()
            return TierLookup.NOTHING
        table = sequence.table = self.cache.table_behind(sequence.nodes)
        num_device = len(table)
        table.append(count * self.cache.block_size)
        load = match.load(table.ids[num_device:].tolist())
        self.loading[sequence] = ChainLoading(load, step, match, num_device)
        return TierLookup.LOADING

    def _may_be_there(self, sequence: Sequence, limit: int) -> bool:
        """Whether tiers may have the next block: else those behind it need no names."""
        place = len(sequence.nodes)
        end = min(limit, (place + 1) * self.cache.block_size)
        next_block = self._tokens_from(sequence, place, end)
        keys = chain_keys(self._last_key(sequence), next_block)
        return bool(keys) and self.store.may_have(keys[0])

    def _copies_from_free(self, copies: list[BlockCopy]) -> bool:
        """Whether what is copied from is free already: it must not be filled before that."""
        holders = self.cache.allocator.ref_counts
        return any(holders[source] == 0 for source, _ in copies)

    def places(self, sequence: Sequence) -> list[str]:
        """The tier of each block that is being loaded for it."""
        each = self.loading[sequence]
        assert sequence.table is not None and isinstance(each, ChainLoading)
        return each.match.places[: len(sequence.table) - each.num_device]

    def take_loaded(self) -> list[tuple[Sequence, Loaded | None]]:
        """Sequences whose loads are over, and what is there now; None if they have to begin again.

        Their tables hold no more than that; the blocks are published.
        """
        over = [sequence for sequence, each in self.loading.items() if each.load.done()]
        return [(sequence, self._finish_load(sequence)) for sequence in over]

    def _finish_load(self, sequence: Sequence) -> Loaded | None:
        each = self.loading.pop(sequence)
        table, block_size = sequence.table, self.cache.block_size
        assert table is not None and isinstance(each, ChainLoading)
        count, first = each.load.num_loaded, each.num_device
        table.truncate((first + count) * block_size)
        tokens = sequence.tokens.ids[first * block_size : (first + count) * block_size]
        blocks = table.ids[first:].tolist()
        self.cache.publish(sequence.request.namespace, sequence.nodes, tokens, blocks)
        for node, name in zip(sequence.nodes[first:], each.match.names, strict=False):
            node.key, node.offered = name.key, 1
        places = each.match.places[:count]
        self._count(places)
        return Loaded(places, len(places))

    def _count(self, places: list[str]) -> None:
        block_size = self.cache.block_size
        self.tokens_by_tier.update({p: n * block_size for p, n in Counter(places).items()})

    def begun_since(self, step: int) -> list[Sequence]:
        return [sequence for sequence, each in self.loading.items() if each.step >= step]

    def abandon(self, sequence: Sequence) -> None:
        """What is being loaded for it is stopped, and its blocks are freed after that."""
        self._drop_match(sequence)
        each = self.loading.pop(sequence, None)
        if each is not None:
            assert sequence.table is not None
            self._abandoned.append((self.store.withdraw(each.load), sequence.table))
            sequence.table = None
            self.poll()

    def _drop_match(self, sequence: Sequence) -> None:
        match = self._matches.pop(sequence, None)
        if match is not None:
            match.drop()

    def prefetch(self, waiting: Iterable[Sequence], prefixes: Prefixes) -> None:
        """They will have to wait: bring their blocks nearer, once for each."""
        for sequence in waiting:
            if not sequence.prefetched:
                sequence.prefetched = True
                sequence.nodes = prefixes.match(sequence)
                limit = prefixes.cacheable(sequence)
                self.store.prefetch(self._names_behind(sequence, limit))

    def _worth_loading(self, sequence: Sequence, match: TierMatch) -> int:
        """How many blocks to load: as many as makes the least time with the rest computed.

        A few blocks are loaded from a tier whose speed is not known, to measure it.
        """
        rates, host = self.store.rates, self.store.host.name
        block_size = self.cache.block_size
        few = max(1, min(BLOCKS_TO_TRY, TOKENS_TO_TRY // block_size))
        computing = rates.seconds_for(PREFILL, block_size)
        if computing is None or sequence.request.is_handed_over:
            return len(match)
        best, most_saved, saved = 0, 0.0, 0.0
        tried: Counter[str] = Counter()
        for at, place in enumerate(match.places):
            loading = rates.seconds_for(place, 1)
            if loading is None:
                tried[place] += 1
                if place != host and tried[place] > few:
                    break
            saved += computing - (loading or 0.0)
            if saved > most_saved:
                best, most_saved = at + 1, saved
        if best < len(match):
            place = match.places[best]
            sequence.request.miss_reason = f"loading from {place} would be slower than computing"
        return best

    # --- keeping ------------------------------------------------------------------------------

    def offer(self, sequence: Sequence, first: int, end: int) -> None:
        """Blocks `first` to `end` of a sequence are computed: let the tiers have them."""
        assert sequence.table is not None
        new = [at for at in range(first, end) if not sequence.nodes[at].offered]
        if not new or not self._may_offer(len(new)):
            return
        nodes = [sequence.nodes[at] for at in new]
        for node in nodes:
            node.offered = 1
        # Named by the thread that copies them: what a node's key depends on does not change.
        self._put(partial(self._names, nodes, sequence), sequence.table.ids[new].tolist())

    def offer_end(self, sequence: Sequence) -> None:
        """A sequence has ended with an answer; all of it was offered as it was computed."""

    def _may_offer(self, count: int) -> bool:
        """Whether copies may hold so many blocks more."""
        self.poll()
        held = sum(len(blocks) for _, blocks in self._puts)
        if held + count > max(FEW_BLOCKS, self.cache.num_blocks // 2):
            self.num_not_offered += count
            return False
        return True

    def _put(self, names: Names, blocks: list[int]) -> None:
        self.cache.allocator.share(blocks)
        self._puts.append((self.store.put_names(names, blocks, is_computed=True), blocks))

    def note_use(self, sequence: Sequence) -> None:
        """A request has begun: it asked for all full blocks of its prompt, cached or not."""
        behind = self._tokens_behind(sequence, sequence.prompt_len)
        self._uses.append((sequence, list(sequence.nodes), behind))

    def tell_uses(self) -> None:
        """Let the tiers know what was asked for, as noted while a step was planned.

        For when that step is launched: until then their thread would take time from this one.
        """
        uses, self._uses = self._uses, []
        for sequence, nodes, behind in uses:
            keys = self._keys(nodes, sequence)
            self.store.use(keys, keys[-1] if keys else self._root(sequence), behind)

    # --- as a whole -----------------------------------------------------------------------------

    def copied_blocks(self) -> list[int]:
        """Blocks that copies hold, for as long as these are under way; each as often as held."""
        leaving = [block for _, blocks in self._puts for block in blocks]
        return leaving + [block for _, table in self._abandoned for block in table.ids.tolist()]

    def wait(self, timeout: float) -> None:
        """Until something has ended, since the last call."""
        self.store.handles.wait_for_any(timeout)

    def poll(self) -> None:
        """Give back the blocks of copies that are over."""
        over, self._puts = _apart(self._puts)
        for _, blocks in over:
            self.cache.allocator.release(blocks[::-1])
        gone, self._abandoned = _apart(self._abandoned)
        for _, table in gone:
            table.truncate(0)

    def wait_for_copies(self, timeout: float) -> None:
        """Wait until no copy holds a block; for when there is nothing else to do."""
        for put, _ in self._puts:
            put.wait(timeout)
        for gone, _ in self._abandoned:
            gone.wait(timeout)
        self.poll()

    def clear_host(self) -> None:
        """Forget what host memory keeps, but not what is on disks or in a remote cache."""
        self.store.host.clear()

    def reset(self) -> None:
        """Every block is about to be taken away: nothing may touch them any more."""
        for match in self._matches.values():
            match.drop()
        self.store.leave_device(LEAVE_DEVICE_S)
        self._matches, self.loading, self._puts, self._abandoned = {}, {}, [], []

    def close(self) -> None:
        self.reset()
        self.store.close()

    def stats(self) -> dict[str, Any]:
        tiers = self.store.stats()
        if self.num_not_offered:
            tiers[self.store.host.name]["drops"]["pool is busy"] = self.num_not_offered
        for name, each in tiers.items():
            each["hit_tokens"] = self.tokens_by_tier[name]
        return tiers

    def store_stats(self) -> dict[str, Any]:
        return self.store.stats()

    def slot_states(self) -> dict[str, Any]:
        return self.store.slot_states()

    def publish_events(self, log: BlockLog) -> None:
        self.store.publish_events(log)

    # --- names ----------------------------------------------------------------------------------

    def _names_behind(self, sequence: Sequence, limit: int) -> list[BlockName]:
        tokens = self._tokens_behind(sequence, limit)
        tenant = tenant_tag(sequence.request.tenant)
        return block_names(self._root(sequence), self._last_key(sequence), tokens, tenant)

    def _tokens_behind(self, sequence: Sequence, limit: int) -> list[bytes]:
        """The tokens of its full blocks up to `limit` that have no node yet."""
        return self._tokens_from(sequence, len(sequence.nodes), limit)

    def _tokens_from(self, sequence: Sequence, place: int, limit: int) -> list[bytes]:
        block_size = self.cache.block_size
        first = place * block_size
        packed = sequence.tokens.ids[first : limit // block_size * block_size].tobytes()
        width = 4 * block_size
        return [packed[at : at + width] for at in range(0, len(packed), width)]

    def _last_key(self, sequence: Sequence) -> bytes:
        last = self._keys(sequence.nodes[-1:], sequence)
        return last[0] if last else self._root(sequence)

    def _names(self, nodes: list[Node], sequence: Sequence) -> list[BlockName]:
        keys, root = self._keys(nodes, sequence), self._root(sequence)
        tenant = tenant_tag(sequence.request.tenant)
        parents = [node.parent.key or root if node.parent else root for node in nodes]
        each = zip(keys, parents, nodes, strict=True)
        return [BlockName(key, parent, root, node.tokens, tenant) for key, parent, node in each]

    def _keys(self, nodes: list[Node], sequence: Sequence) -> list[bytes]:
        """The keys of nodes one behind the other, found once and kept in them."""
        if nodes and nodes[-1].key is None:
            find_key(nodes[-1], self._root(sequence))
        return [node.key for node in nodes if node.key is not None]

    def _root(self, sequence: Sequence) -> bytes:
        return self.store.root(sequence.request.namespace)


def _apart(copies: list[tuple[H, T]]) -> tuple[list[tuple[H, T]], list[tuple[H, T]]]:
    """Those that are over and those that go on; each is asked once, since it may end meanwhile."""
    over: list[tuple[H, T]] = []
    going_on: list[tuple[H, T]] = []
    for each in copies:
        (over if each[0].done() else going_on).append(each)
    return over, going_on
