"""What one may look at from outside, as plain data: stats, the block map, a block, the journal.

These run between two steps, in the engine's own thread. With a `tenant` they show what belongs to
namespaces that begin with it, and of all others only how much there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.engine import Engine
from quire.engine.observe.block_map import block_map, holders_of
from quire.engine.observe.block_owners import take_stock, with_tables
from quire.engine.observe.journal import Journal, Story
from quire.engine.sequence import Request
from quire.errors import RequestError

MOST_HOLDERS_NAMED = 32
HOLDER_BOUNDS = [1, 2, 4, 8, 16, 32, 64]

View = Callable[..., dict[str, Any]]


def views(engine: Engine) -> dict[str, View]:
    """By name, as another process may ask for them."""
    named: dict[str, View] = {
        "stats": engine_stats,
        "blocks": blocks,
        "block": block,
        "journal": journal,
    }
    return {name: partial(view, engine) for name, view in named.items()}


def engine_stats(engine: Engine) -> dict[str, Any]:
    """Blocks, hits and counters since the start."""
    scheduler, recovery = engine.scheduler, engine.recovery
    scheduler.tiering.poll()
    return {
        "blocks": _block_stats(engine),
        "prefix": {
            "queries": scheduler.admission.hits.num_query_tokens,
            "hits": scheduler.admission.hits.num_hit_tokens,
            "hits_by_tier": dict(scheduler.admission.hits.hits_by_tier),
            "misses": dict(scheduler.admission.hits.misses),
        },
        "preemptions": scheduler.queues.num_preemptions,
        "forks": {
            "count": scheduler.num_forks,
            "shared_blocks": scheduler.num_shared_blocks,
            "copied_blocks": scheduler.planner.num_copied_blocks,
        },
        "tiers": scheduler.tiering.stats(),
        "speculation": scheduler.speculation.stats(),
        "adapters": {} if engine.adapters is None else _adapter_stats(engine, engine.adapters),
        "requests": {
            "running": len(scheduler.running),
            "loading": len(scheduler.loading),
            "waiting": engine.num_waiting,
        },
        "startup_seconds": dict(engine.observed.startup.seconds),
        "steps": engine.commit.num_steps,
        "step_tokens": engine.commit.step_tokens.as_dict(),
        "token_seconds": engine.commit.token_seconds.as_dict(),
        "attention_seconds": engine.observed.attention_seconds.as_dict(),
        "tokens": {
            "computed": engine.commit.num_computed_tokens,
            "generated": engine.commit.num_generated_tokens,
        },
        "recovery": {
            "out_of_memory": recovery.num_out_of_memory,
            "failed_steps": recovery.num_failures,
            "token_budget": scheduler.budget,
        },
    }


def _adapter_stats(engine: Engine, adapters: AdapterCatalog) -> dict[str, Any]:
    running = (sequence.request for sequence in engine.scheduler.running)
    waiting = (r for r in engine.requests if r.num_cached_tokens is None)
    return {
        **adapters.stats(),
        "running": _adapter_names(running),
        "waiting": _adapter_names(waiting),
    }


def _adapter_names(requests: Iterable[Request]) -> list[str]:
    return sorted({request.lora.asked.lora_name for request in requests if request.lora})


def _block_stats(engine: Engine) -> dict[str, Any]:
    scheduler, stock = engine.scheduler, take_stock(engine.scheduler)
    allocator = scheduler.cache.allocator
    return {
        "total": allocator.num_blocks,
        "free": allocator.num_free,
        "cached": allocator.num_cached,
        "in_use": allocator.num_in_use,
        "allocated": allocator.num_allocated,
        "evicted": allocator.num_evicted,
        "matched": scheduler.admission.hits.num_matched_blocks,
        "block_size": scheduler.cache.block_size,
        "block_bytes": engine.observed.block_bytes,
        "empty_slots": stock.empty_slots(scheduler.cache.block_size),
        "holders": {"bounds": HOLDER_BOUNDS, "counts": stock.counts_by_holders(HOLDER_BOUNDS)},
    }


def blocks(engine: Engine, tenant: str = "") -> dict[str, Any]:
    """The block map of every tier."""
    return block_map(engine.scheduler, tenant)


def block(engine: Engine, block: int, count: int = 1, tenant: str = "") -> dict[str, Any]:
    """One block of the device: its state, who holds it and its text; of several, the busiest."""
    cache = engine.scheduler.cache
    if not (0 <= block < cache.num_blocks and count >= 1):
        raise RequestError(f"There are blocks 0 to {cache.num_blocks - 1}; ask for one of them.")
    allocator = cache.allocator
    num_holders, keyed = allocator.ref_counts, allocator.keyed
    near = range(block, min(block + count, cache.num_blocks))
    chosen = max(near, key=lambda each: (num_holders[each], keyed[each]))
    holders = holders_of(chosen, with_tables(engine.scheduler)) if num_holders[chosen] else []
    mine = [h for h in holders if h[0].request.namespace.startswith(tenant)]
    return {
        "block": chosen,
        "state": _state(num_holders[chosen], bool(keyed[chosen])),
        "holders": num_holders[chosen],
        "requests": [
            {"request": sequence.request.id, "sample": sequence.sample, "place": place}
            for sequence, place in mine[:MOST_HOLDERS_NAMED]
        ],
        **_content(engine, chosen, mine[:1], tenant),
    }


def _state(holders: int, is_keyed: bool) -> str:
    if holders:
        return "shared" if holders > 1 else "in use"
    return "cached" if is_keyed else "free"


def _content(engine: Engine, block: int, holder: list[Any], tenant: str) -> dict[str, Any]:
    """Its tokens, if they are known and are this tenant's."""
    cache = engine.scheduler.cache
    token_ids: list[int] = []
    if holder:
        sequence, place = holder[0]
        first = place * cache.block_size
        end = min(first + cache.block_size, sequence.num_computed)
        token_ids = sequence.tokens.ids[first:end].tolist()
    elif (found := cache.index.content(block)) is not None:
        salt, tokens = found
        if salt.startswith(tenant):
            token_ids = np.frombuffer(tokens, dtype=np.int32).tolist()
    return {"tokens": len(token_ids), "text": _text(engine, token_ids)}


def journal(engine: Engine, since: int = 0, limit: int = 50, tenant: str = "") -> dict[str, Any]:
    """The stories of the last requests that have changed since a version."""
    watch = engine.scheduler.watch
    if not isinstance(watch, Journal):
        return {"version": 0, "requests": []}
    stories = watch.stories(since)
    mine = [s for s in stories if s.namespace.startswith(tenant)]
    return {
        "version": watch.version,
        "requests": [_told(engine, story) for story in mine[:limit]],
    }


def _told(engine: Engine, story: Story) -> dict[str, Any]:
    request = engine.find_request(story.id)
    told = {**story.as_dict(), "preview": _text(engine, story.preview.tolist(), special=False)}
    if request is not None and request.number == story.number:
        told |= {"now": _progress(request), "output_tokens": _num_output(request)}
    return told


def _progress(request: Request) -> list[dict[str, Any]]:
    return [
        {
            "sample": sequence.sample,
            "status": sequence.status.name.lower(),
            "tokens": sequence.num_output,
            "held": len(sequence.table) if sequence.table is not None else 0,
        }
        for sequence in request.sequences
    ]


def _num_output(request: Request) -> int:
    return sum(sequence.num_output for sequence in request.sequences)


def _text(engine: Engine, token_ids: list[int], special: bool = True) -> str:
    if engine.model.tokenizer is None or not token_ids:
        return ""
    return engine.model.tokenizer.decode(token_ids, skip_special_tokens=not special)
