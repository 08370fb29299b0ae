"""`Tiering` for models with several KV groups, or with windows.

What the device has and what the tiers have make one hit together, group by group: what the hit
needs and the device lacks is loaded. Of windows the tiers are offered those that end a prompt or an
answer, and one now and then between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from quire.engine.schedule.no_tiers import TierLookup
from quire.engine.schedule.prefill_rate import PREFILL
from quire.engine.schedule.prefixes import Prefixes
from quire.engine.schedule.tiering import (
    BLOCKS_TO_TRY,
    HANDED_OVER_S,
    TOKENS_TO_TRY,
    Loaded,
    Loading,
    Tiering,
)
from quire.engine.sequence import Sequence
from quire.kv.grouped_match import GroupedMatch, OnDevice
from quire.kv.grouped_table import Table
from quire.kv.hit_rule import first_needed
from quire.kv.image import BlockName
from quire.kv.index import GONE, Node
from quire.kv.kept_windows import asked_keys, is_kept
from quire.kv.keys import block_names, group_name, tenant_tag
from quire.kv.prefix import PrefixCache
from quire.kv.store_protocol import Store
from quire.kv.table import BlockCopy

MOST_LOADS = 3  # for one sequence: a tier may go on saying that it has what it cannot read


@dataclass
class GroupedLoading(Loading):
    match: GroupedMatch
    blocks: list[int]  # where the match's images go
    places: list[str]  # the tier of each block of tokens, as `Loaded` has it


def tiering_for(store: Store, cache: PrefixCache) -> Tiering:
    return Tiering(store, cache) if cache.windows == (None,) else GroupedTiering(store, cache)


class GroupedTiering(Tiering):
    def __init__(self, store: Store, cache: PrefixCache) -> None:
        super().__init__(store, cache)
        self._num_failed: Counter[Sequence] = Counter()  # loads, of those that wait again

    # --- loading ----------------------------------------------------------------------------------

    def begin(
        self, sequence: Sequence, limit: int, step: int, copies: list[BlockCopy]
    ) -> TierLookup:
        if self._copies_from_free(copies):
            return TierLookup.ASKED
        num_device, most = len(sequence.nodes), limit // self.cache.block_size
        if num_device >= most or self._num_failed[sequence] >= MOST_LOADS:
            self._drop_match(sequence)
            return TierLookup.NOTHING
        chain = self._chain(sequence, limit)
        on_device = partial(_has_block, chain)
        match = self._matches.get(sequence)
        is_new = match is None
        if match is None:
            patience = HANDED_OVER_S if sequence.request.is_handed_over else None
            match = self._matches[sequence] = self._match(sequence, chain, limit, patience)
        assert isinstance(match, GroupedMatch)
        if not match.ready():
            return TierLookup.ASKED
        del self._matches[sequence]
        if match.reached != len(chain) or match.first > self._first_place(num_device):
            match.drop()  # the device has more, or less, of its prefix than when it was asked
            return self.begin(sequence, limit, step, copies)
        if not is_new:
            match.take_hit(on_device, match.end)
        if self._take_worthwhile(sequence, match, on_device) <= num_device:
            match.drop()
            return TierLookup.NOTHING
        sequence.table, blocks = self._table(chain, match)
        load, places = match.load(blocks), _tier_of_places(match, num_device)
        self.loading[sequence] = GroupedLoading(load, step, match, blocks, places)
        return TierLookup.LOADING

    def _chain(self, sequence: Sequence, limit: int) -> list[Node]:
        """What the index has of its prefix, whether or not its windows are there."""
        tokens = sequence.tokens.ids[: limit // self.cache.block_size * self.cache.block_size]
        return self.cache.index.match(sequence.request.namespace, tokens, sequence.nodes)

    def _first_place(self, num_device: int) -> int:
        """The first place that a hit longer than the device's needs of any window."""
        size = self.cache.block_size
        each = [first_needed((num_device + 1) * size, window, size) for window in self._sliding()]
        return min(each, default=num_device)

    def _sliding(self) -> list[int]:
        return [window for window in self.cache.windows if window is not None]

    def _match(
        self, sequence: Sequence, chain: list[Node], limit: int, patience: float | None
    ) -> GroupedMatch:
        first = min(self._first_place(len(sequence.nodes)), len(chain))
        names = self._names(chain[first:], sequence) + self._chain_names(sequence, chain, limit)
        on_device = partial(_has_block, chain)
        return self.store.match_groups(
            self.cache.windows, names, first, len(chain), on_device, patience
        )

    def _chain_names(self, sequence: Sequence, chain: list[Node], limit: int) -> list[BlockName]:
        """The names of its full blocks up to `limit` tokens that have no node."""
        last = self._keys(chain[-1:], sequence)
        root, tenant = self._root(sequence), tenant_tag(sequence.request.tenant)
        tokens = self._tokens_from(sequence, len(chain), limit)
        return block_names(root, last[0] if last else root, tokens, tenant)

    def _take_worthwhile(self, sequence: Sequence, match: GroupedMatch, on_device: OnDevice) -> int:
        """Keep the hit, or take a shorter one: what makes the least time with the rest computed.

        A few blocks are loaded from a tier whose speed is not known, if a hit is as short.
        """
        longest, num_device = match.hit, len(sequence.nodes)
        computing = self.store.rates.seconds_for(PREFILL, self.cache.block_size)
        if longest <= num_device or computing is None or sequence.request.is_handed_over:
            return longest
        most_saved = self._saved(match, num_device, computing)
        places = [image.found.place for image in match.images]
        if most_saved > 0 and self._all_are_quick(places, computing):
            return longest
        cut = self._cheap_end(match, num_device, computing)
        if cut < longest:
            shorter = match.take_hit(on_device, cut)
            if shorter > num_device:
                saved = self._saved(match, num_device, computing)
                is_trial = self._is_trial(places)
                if saved > 0 and (is_trial or saved >= most_saved):
                    sequence.request.miss_reason = _slower(places)
                    return shorter
            match.take_hit(on_device, longest)
        if most_saved > 0:
            return match.hit
        sequence.request.miss_reason = _slower(places)
        return 0

    def _all_are_quick(self, places: list[str], computing: float) -> bool:
        """Whether even blocks of all groups load faster than their tokens are computed: most often,
        and then no shorter hit saves more."""
        each = [self.store.rates.seconds_for(place, self.cache.num_groups) for place in set(places)]
        return all(seconds is not None and seconds < computing for seconds in each)

    def _saved(self, match: GroupedMatch, num_device: int, computing: float) -> float:
        """Seconds, where a tier of unknown speed counts as quick."""
        seconds_for = self.store.rates.seconds_for
        places = Counter(image.found.place for image in match.images)
        loading = sum(seconds_for(place, count) or 0.0 for place, count in places.items())
        return (match.hit - num_device) * computing - loading

    def _cheap_end(self, match: GroupedMatch, num_device: int, computing: float) -> int:
        """The end of the places that are quicker to load than to compute, or are enough to try."""
        host = self.store.host.name
        few = max(1, min(BLOCKS_TO_TRY, TOKENS_TO_TRY // self.cache.block_size))
        at_place: dict[int, list[str]] = {}
        for image in match.images:
            at_place.setdefault(image.place, []).append(image.found.place)
        tiers = {tier for of_place in at_place.values() for tier in of_place}
        seconds = {tier: self.store.rates.seconds_for(tier, 1) for tier in tiers}
        unknown = {tier for tier in tiers - {host} if seconds[tier] is None}
        best, most_saved, saved = num_device, 0.0, 0.0
        tried: Counter[str] = Counter()
        for place in range(num_device, match.hit):
            for tier in at_place.get(place, ()):
                saved -= seconds[tier] or 0.0
                if tier in unknown:
                    tried[tier] += 1
            if unknown and any(count > few for count in tried.values()):
                break
            saved += computing
            if saved > most_saved:
                best, most_saved = place + 1, saved
        return best

    def _is_trial(self, places: list[str]) -> bool:
        """Whether a tier among these was not measured lately."""
        seconds_for, host = self.store.rates.seconds_for, self.store.host.name
        return any(seconds_for(place, 1) is None for place in set(places) - {host})

    def _table(self, chain: list[Node], match: GroupedMatch) -> tuple[Table, list[int]]:
        """A table for the hit, and those of its blocks that are to be filled, as `images` are."""
        table, allocator = self.cache.new_table(), self.cache.allocator
        length, hit = match.hit * self.cache.block_size, match.hit
        firsts = [match.first_needed(group) for group in range(self.cache.num_groups)]
        held = [
            [node.blocks[group] for node in chain[first:hit]] for group, first in enumerate(firsts)
        ]
        shared = [block for of_group in held for block in of_group if block != GONE]
        allocator.share(shared)  # else they might be given away for those that are taken next
        taken = allocator.allocate(len(match.images))
        blocks = {(i.group, i.place): block for i, block in zip(match.images, taken, strict=True)}
        for group, of_group in enumerate(table.groups):
            first = firsts[group]
            ids = held[group] + [GONE] * (hit - first - len(held[group]))
            for at, block in enumerate(ids):
                if block == GONE:
                    ids[at] = blocks[group, first + at]
            of_group.adopt(ids, length, first)
        allocator.release(shared)
        allocator.release(taken)
        return table, taken

    def places(self, sequence: Sequence) -> list[str]:
        each = self.loading[sequence]
        assert isinstance(each, GroupedLoading)
        return each.places

    def _finish_load(self, sequence: Sequence) -> Loaded | None:
        """What has arrived is published. If that is not all, the sequence looks anew for a hit."""
        each, table = self.loading.pop(sequence), sequence.table
        assert table is not None and isinstance(each, GroupedLoading)
        match = each.match
        loaded = [dict[int, int]() for _ in self.cache.windows]
        for image, block, there in zip(match.images, each.blocks, each.load.arrived, strict=True):
            if there:
                loaded[image.group][image.place] = block
        tokens = sequence.tokens.ids[: match.hit * self.cache.block_size]
        chain = self.cache.publish_loaded(sequence.request.namespace, tokens, loaded)
        for node, key in zip(chain[match.first :], match.chain_keys, strict=False):
            node.key = key
        for group, of_group in enumerate(loaded):
            for place in of_group:
                if place < len(chain):
                    chain[place].offered |= 1 << group
        if not each.load.is_whole:
            self._num_failed[sequence] += 1
            table.truncate(0)
            sequence.table = None
            return None
        self._num_failed.pop(sequence, None)
        sequence.nodes = chain
        self._count(each.places)
        return Loaded(each.places, len(match.images))

    def abandon(self, sequence: Sequence) -> None:
        self._num_failed.pop(sequence, None)
        super().abandon(sequence)

    def prefetch(self, waiting: Iterable[Sequence], prefixes: Prefixes) -> None:
        for sequence in waiting:
            if not sequence.prefetched:
                sequence.prefetched = True
                sequence.nodes = prefixes.match(sequence)
                limit = prefixes.cacheable(sequence)
                if len(sequence.nodes) < limit // self.cache.block_size:
                    self._prefetch(sequence, limit)

    def _prefetch(self, sequence: Sequence, limit: int) -> None:
        """Fetch what the device lacks of the hit that the tiers at hand make possible."""
        chain = self._chain(sequence, limit)
        match = self._match(sequence, chain, limit, patience=0)
        names = match.names() if match.hit > len(sequence.nodes) else []
        match.drop()
        self.store.prefetch(names)

    # --- keeping ----------------------------------------------------------------------------------

    def offer(self, sequence: Sequence, first: int, end: int) -> None:
        """Windows are offered that end the prompt or a stride, before they are given back."""
        assert sequence.table is not None
        size, prompt_len = self.cache.block_size, sequence.prompt_len
        sequence.num_offered = end
        self._offer(
            sequence,
            [
                (group, place)
                for group, window in enumerate(self.cache.windows)
                for place in range(first, end)
                if window is None or is_kept(place, window, size, prompt_len)
            ],
        )

    def offer_end(self, sequence: Sequence) -> None:
        """The windows that end an answer."""
        if sequence.table is None or not sequence.num_offered:
            return
        length = sequence.num_offered * self.cache.block_size
        images = []
        for group, table in enumerate(sequence.table.groups):
            if table.window is not None:
                first = first_needed(length, table.window, self.cache.block_size)
                places = range(max(first, table.first), sequence.num_offered)
                images += [(group, place) for place in places]
        self._offer(sequence, images)

    def _offer(self, sequence: Sequence, images: list[tuple[int, int]]) -> None:
        """These blocks, by group and place, are computed: let the tiers have them."""
        assert sequence.table is not None
        nodes, tables = sequence.nodes, sequence.table.groups
        new = [(group, place) for group, place in images if not nodes[place].offered >> group & 1]
        if not new or not self._may_offer(len(new)):
            return
        places = sorted({place for _, place in new})
        of_places = self._names([nodes[place] for place in places], sequence)
        of_chain = dict(zip(places, of_places, strict=True))
        names = [group_name(of_chain[place], group) for group, place in new]
        for group, place in new:
            nodes[place].offered |= 1 << group
        ids = [int(tables[group].ids[place - tables[group].first]) for group, place in new]
        self._put(names, ids)

    def tell_uses(self) -> None:
        uses, self._uses = self._uses, []
        for sequence, nodes, behind in uses:
            keys = self._keys(nodes, sequence)
            last = keys[-1] if keys else self._root(sequence)
            of_groups = partial(
                asked_keys,
                windows=self.cache.windows,
                block_size=self.cache.block_size,
                prompt_len=sequence.prompt_len,
                hit=len(nodes),
            )
            self.store.use(keys, last, behind, of_groups)

    def reset(self) -> None:
        super().reset()
        self._num_failed.clear()


def _has_block(chain: list[Node], group: int, place: int) -> bool:
    return place < len(chain) and chain[place].blocks[group] != GONE


def _tier_of_places(match: GroupedMatch, num_device: int) -> list[str]:
    """The tier of each block of tokens behind the device's own hit that it took to make the hit.

    Where a window alone was loaded, it is what makes a hit of all tokens in front of it that
    no group needs any more.
    """
    tiers: dict[int, str] = {}
    for image in match.images:
        tiers.setdefault(image.place, image.found.place)
    needed = min(match.first_needed(group) for group in range(match.num_groups))
    first = next((tiers[place] for place in range(needed, match.hit) if place in tiers), None)
    places = [
        first if place < needed else tiers.get(place) for place in range(num_device, match.hit)
    ]
    return [place for place in places if place is not None]


def _slower(places: list[str]) -> str:
    farthest = Counter(places).most_common(1)[0][0]
    return f"loading from {farthest} would be slower than computing"
