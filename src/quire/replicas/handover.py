"""Prefill and decode apart: one replica computes a prompt's blocks, another goes on from the store.

    request ─► prefill replica: the prompt's full blocks, and no answer
                    │ images
                    ▼
                the store that all share ─► decode replica: loads them, and answers

Whatever goes wrong on the way, the decode replica computes what it does not find.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.request_options import RequestOptions

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
NO_ANSWER = SamplingParams(temperature=0, max_tokens=1)
LEAST_BLOCKS = 8  # to be computed, for a detour to be worth it
PATIENCE_S = 60.0  # for a prefill replica that hangs; one that dies is noticed at once


def roles(num_replicas: int, num_prefill: int, store: str | None) -> list[str]:
    """The role of each replica; ConfigError for what cannot work."""
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


def prompt_only(options: RequestOptions) -> RequestOptions:
    """The same request without its answer, over when its blocks are in the store."""
    return replace(options, stream=False, wait_for_store=True)
