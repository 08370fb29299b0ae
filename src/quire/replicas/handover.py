"""Prefill and decode apart: one replica computes a prompt's blocks, another goes on from the store.

    request ─► prefill replica: the prompt's full blocks, and no answer
                    │ images
                    ▼
                the store that all share ─► decode replica: loads them, and answers

Whatever goes wrong on the way, the decode replica computes what it does not find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.process.messages import Order, make_order
from quire.errors import ConfigError
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
LEAST_BLOCKS = 8  # to be computed, for a detour to be worth it
PATIENCE_S = 60.0  # for a prefill replica that hangs; one that dies is noticed at once


def roles(num_replicas: int, num_prefill: int, store: str | None) -> list[str]:
    """Of each replica; ConfigError for what cannot work."""
    if not num_prefill:
        return [BOTH] * num_replicas
    if num_prefill >= num_replicas:
        raise ConfigError(
            f"prefill_replicas={num_prefill} leaves none of the {num_replicas} replicas to "
            "decode; lower it, or raise replicas."
        )
    if store is None:
        raise ConfigError(
            "prefill_replicas hand blocks over through a store; set remote_cache_url, too."
        )
    return [PREFILL] * num_prefill + [DECODE] * (num_replicas - num_prefill)


def prompt_only(order: Order, token_ids: TokenIds) -> Order:
    """The same request without its answer, over when its blocks are in the store."""
    return make_order(
        token_ids,
        SamplingParams(temperature=0, max_tokens=1),
        priority=order["priority"],
        cache_salt=order["cache_salt"],
        tenant=order["tenant"],
        queue_s=order["queue_s"],
        name=order["name"],
        kept=True,
    )
