"""The cache and the steps, as `quire_…`; read from what the engine says of itself (`stats`)."""

from __future__ import annotations

from typing import Any

from quire.metrics.measure import Counter, Gauge, Histogram, Labelled, Measure

Stats = dict[str, Any]


def _blocks(name: str) -> Any:
    return lambda stats: stats["blocks"][name]


def _forks(name: str) -> Any:
    return lambda stats: stats["forks"][name]


def _reuse(stats: Stats) -> float:
    blocks = stats["blocks"]
    return _ratio(blocks["matched"], blocks["matched"] + blocks["allocated"])


def _fragmentation(stats: Stats) -> float:
    blocks = stats["blocks"]
    return _ratio(blocks["empty_slots"], blocks["in_use"] * blocks["block_size"])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _memory_used(stats: Stats) -> float:
    blocks = stats["blocks"]
    return float((blocks["in_use"] + blocks["cached"]) * blocks["block_bytes"])


def _memory_of_pool(stats: Stats) -> float:
    return float(stats["blocks"]["total"] * stats["blocks"]["block_bytes"])


def _by_holders(stats: Stats) -> Labelled:
    """`1`, `2`, `3-4`, …, `65+`: how many blocks have so many holders."""
    bounds, counts = stats["blocks"]["holders"]["bounds"], stats["blocks"]["holders"]["counts"]
    starts = [1, *(bound + 1 for bound in bounds)]
    ends = [*map(str, bounds), ""]
    names = [
        f"{start}+" if not end else end if str(start) == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    ]
    return {(name,): count for name, count in zip(names, counts, strict=True)}


def _hits_by_tier(stats: Stats) -> Labelled:
    hits = {"device": 0, **dict.fromkeys(stats["tiers"], 0), **stats["prefix"]["hits_by_tier"]}
    return {(tier,): count for tier, count in hits.items()}


def _misses(stats: Stats) -> Labelled:
    return {(reason,): count for reason, count in stats["prefix"]["misses"].items()}


def _of_tiers(name: str) -> Any:
    """A number that tiers say of themselves, of those that do."""
    return lambda stats: {
        (tier,): each[name] for tier, each in stats["tiers"].items() if name in each
    }


def _room(stats: Stats) -> Labelled:
    tiers = stats["tiers"].items()
    room = {tier: each.get("capacity", each.get("slots")) for tier, each in tiers}
    return {(tier,): count for tier, count in room.items() if count is not None}


def _traffic(what: str) -> Any:
    def read(stats: Stats) -> Labelled:
        return {
            (tier, direction): each[f"{direction}s"][what]
            for tier, each in stats["tiers"].items()
            for direction in ("read", "write")
        }

    return read


def _drops(stats: Stats) -> Labelled:
    return {
        (tier, reason): count
        for tier, each in stats["tiers"].items()
        for reason, count in each["drops"].items()
    }


def _breakers(stats: Stats) -> Labelled:
    tiers = stats["tiers"].items()
    return {(t,): float(each["breaker"] != "closed") for t, each in tiers if "breaker" in each}


def _by_position(name: str) -> Any:
    def read(stats: Stats) -> Labelled:
        counts = stats["speculation"].get(name, [])
        return {(str(position),): count for position, count in enumerate(counts, start=1)}

    return read


TIER, TRAFFIC, POSITION = ("tier",), ("tier", "direction"), ("position",)


def _adapters(name: str) -> Any:
    return lambda stats: stats["adapters"].get(name, 0)


QUIRE: list[Measure] = [
    Gauge("quire_num_blocks", "Blocks of the device's pool.", _blocks("total")),
    Gauge("quire_num_free_blocks", "Blocks that hold nothing.", _blocks("free")),
    Gauge(
        "quire_num_cached_blocks",
        "Blocks that no sequence holds and a prompt can find.",
        _blocks("cached"),
    ),
    Gauge("quire_num_in_use_blocks", "Blocks that sequences or copies hold.", _blocks("in_use")),
    Gauge("quire_alloc_rate", "Blocks a second that were allocated lately.", lambda s: s["rate"]),
    Gauge("quire_reuse_rate", "Matched blocks / (matched + allocated), since the start.", _reuse),
    Gauge("quire_fragmentation", "Empty slots / slots held.", _fragmentation),
    Gauge(
        "quire_refcount_hist", "Blocks in use, by how many hold them.", _by_holders, ("holders",)
    ),
    Gauge("quire_gpu_mem_used", "Bytes of the device's memory that hold KV.", _memory_used),
    Gauge("quire_gpu_mem_pool", "Bytes of the device's memory that may hold KV.", _memory_of_pool),
    Gauge("quire_tier_blocks", "Blocks that a tier has room for.", _room, TIER),
    Gauge("quire_tier_used_blocks", "Blocks that a tier holds.", _of_tiers("used"), TIER),
    Gauge(
        "quire_tier_breaker_open", "1 while a tier is left alone after failures.", _breakers, TIER
    ),
    Gauge(
        "quire_requests_loading",
        "Sequences whose blocks come from a lower tier.",
        lambda s: s["requests"]["loading"],
    ),
    Gauge(
        "quire_token_budget",
        "Most tokens of a step; less while memory is short.",
        lambda s: s["recovery"]["token_budget"],
    ),
    Counter("quire_blocks_allocated", "Blocks handed out.", _blocks("allocated")),
    Counter("quire_blocks_matched", "Blocks found and shared instead.", _blocks("matched")),
    Counter("quire_blocks_evicted", "Cached blocks that were allocated anew.", _blocks("evicted")),
    Counter("quire_hit_tokens", "Prompt tokens found, by where.", _hits_by_tier, TIER),
    Counter("quire_misses", "Requests not found whole, by why.", _misses, ("reason",)),
    Counter("quire_tier_moved_blocks", "Blocks moved.", _traffic("blocks"), TRAFFIC),
    Counter("quire_tier_bytes", "Bytes moved.", _traffic("bytes"), TRAFFIC),
    Counter("quire_tier_seconds", "Time spent moving them.", _traffic("seconds"), TRAFFIC),
    Counter("quire_tier_drops", "Blocks that a tier left out or lost.", _drops, ("tier", "reason")),
    Counter(
        "quire_preemptions", "Sequences that gave up their blocks.", lambda s: s["preemptions"]
    ),
    Counter("quire_forks", "Sequences that left another: samples, beams.", _forks("count")),
    Counter("quire_fork_shared_blocks", "Blocks that they took over.", _forks("shared_blocks")),
    Counter("quire_fork_copied_blocks", "Blocks copied before a write.", _forks("copied_blocks")),
    Counter("quire_steps", "Steps computed.", lambda s: s["steps"]),
    Counter(
        "quire_computed_tokens", "Tokens whose KV was computed.", lambda s: s["tokens"]["computed"]
    ),
    Counter(
        "quire_out_of_memory",
        "Steps that ran out of memory, and were made smaller.",
        lambda s: s["recovery"]["out_of_memory"],
    ),
    Counter(
        "quire_failed_steps",
        "Steps that failed for another reason, and were taken back.",
        lambda s: s["recovery"]["failed_steps"],
    ),
    Counter(
        "quire_drafted_tokens",
        "Draft tokens that were verified.",
        lambda s: s["speculation"]["drafted"],
    ),
    Counter(
        "quire_accepted_tokens",
        "Draft tokens that were accepted.",
        lambda s: s["speculation"]["accepted"],
    ),
    Counter(
        "quire_drafted_at",
        "Draft tokens behind accepted ones only, by position.",
        _by_position("drafted_by_position"),
        POSITION,
    ),
    Counter(
        "quire_accepted_at",
        "Of these, the accepted ones.",
        _by_position("accepted_by_position"),
        POSITION,
    ),
    Gauge(
        "quire_mean_accepted_tokens",
        "Accepted draft tokens in a step of a sequence that had some.",
        lambda s: s["speculation"].get("mean_accepted", 0.0),
    ),
    Gauge(
        "quire_speculation_speed_up",
        "Time of speculative steps' tokens: as estimated without drafts / as taken; 1 while none.",
        lambda s: s["speculation"].get("speed_up") or 1.0,
    ),
    Gauge("quire_adapters_in_slots", "Adapters that have a slot.", _adapters("in_slots")),
    Gauge("quire_adapters_in_host", "Adapters in host memory.", _adapters("in_host")),
    Counter("quire_adapter_reads", "Adapters read from their folders.", _adapters("reads")),
    Counter("quire_adapter_loads", "Adapters copied into a slot.", _adapters("loads")),
    Counter("quire_adapter_evictions", "Adapters that left host memory.", _adapters("evictions")),
    Histogram(
        "quire_kv_gather_latency",
        "Seconds of one layer's attention over the pages, from a step now and then.",
        lambda s: s["attention_seconds"],
    ),
]
