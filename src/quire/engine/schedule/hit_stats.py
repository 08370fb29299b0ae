"""How much of what requests asked for was found in the cache, and why not more."""

from __future__ import annotations

from collections import Counter

from quire.engine.schedule.misses import why_missed
from quire.engine.sequence import Sequence
from quire.kv.prefix import PrefixCache


class HitStats:
    """Counters since the start; each request counts at its first admission."""

    def __init__(self, cache: PrefixCache) -> None:
        self.num_query_tokens = 0  # prompt tokens that were looked up in the cache …
        self.num_hit_tokens = 0  # … and found there
        self.hits_by_tier: Counter[str] = Counter()  # those tokens, by where they were
        self.num_matched_blocks = 0  # taken over from the cache instead of allocated
        self.misses: Counter[str] = Counter()  # requests by why they were not found whole
        self._cache = cache

    def admitted(
        self, sequence: Sequence, cached: int, loaded: list[str], num_loaded: int = 0
    ) -> None:
        """It has `cached` tokens in its blocks; `loaded`: the tiers of the last ones.

        `num_loaded`: how many blocks came from there, over all KV groups.
        """
        request, block_size = sequence.request, self._cache.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
            request.cached_tokens_by_tier = self._by_tier(cached, loaded)
            self._note_miss(sequence, cached)
            self.num_query_tokens += sequence.prompt_len
            self.num_hit_tokens += cached
            self.hits_by_tier.update(request.cached_tokens_by_tier)
        if sequence.table is not None:
            in_parts = self._cache.num_groups if cached % block_size else 0
            self.num_matched_blocks += len(sequence.table) - in_parts - num_loaded

    def _by_tier(self, cached: int, loaded: list[str]) -> dict[str, int]:
        block_size = self._cache.block_size
        by_tier = {place: count * block_size for place, count in Counter(loaded).items()}
        on_device = cached - len(loaded) * block_size
        return {"device": on_device, **by_tier} if on_device else by_tier

    def _note_miss(self, sequence: Sequence, cached: int) -> None:
        request = sequence.request
        miss = why_missed(sequence, cached, self._cache)
        if request.miss_reason is not None:
            self.misses["slower than computing"] += 1
        elif miss is not None:
            request.miss_reason = miss.says
            self.misses[miss.kind] += 1
