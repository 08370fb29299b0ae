"""Requests, under the names that dashboards made for vLLM read.

`ENGINE` is read from the engine's stats, `REQUESTS` from `RequestStats`.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from typing import Any

from quire.histogram import SECONDS, TOKENS, BucketCounts
from quire.metrics.measure import Counter, Gauge, Histogram, Labelled, Measure
from quire.metrics.record import RequestRecord

Stats = dict[str, Any]

REASONS = ("stop", "length", "abort", "error")
SMALL_COUNTS = (1, 2, 5, 10, 20)
MOST_ADAPTERS = 64  # that are counted by name: clients may load as many as they like, …
OTHERS = "(others)"  # … and all that come later share one
MOST_NAMED = 16  # adapters in one label


class RequestStats:
    """What the requests that have ended add up to."""

    def __init__(self) -> None:
        self.finished: Counts[str] = Counts(dict.fromkeys(REASONS, 0))
        self.refused: Counts[str] = Counts()
        self.seconds = {
            name: BucketCounts(SECONDS)
            for name in ("first", "all", "queued", "prefill", "decode", "inference", "per_token")
        }
        self.prompt_tokens = BucketCounts(TOKENS)
        self.output_tokens = BucketCounts(TOKENS)
        self.longest_samples = BucketCounts(TOKENS)
        self.computed_tokens = BucketCounts(TOKENS)
        self.max_tokens = BucketCounts(TOKENS)
        self.samples = BucketCounts(SMALL_COUNTS)
        self.adapters: Counts[str] = Counts()  # requests, by the name of their adapter, …
        self.adapter_tokens: Counts[str] = Counts()  # … and the tokens of their answers

    def add(self, record: RequestRecord) -> None:
        self.finished[record.finish_reason] += 1
        if record.adapter:
            is_known = record.adapter in self.adapters or len(self.adapters) < MOST_ADAPTERS
            name = record.adapter if is_known else OTHERS
            self.adapters[name] += 1
            self.adapter_tokens[name] += record.num_output_tokens
        self.seconds["all"].add(record.seconds)
        self.prompt_tokens.add(record.num_prompt_tokens)
        self.output_tokens.add(record.num_output_tokens)
        self.longest_samples.add(record.longest_sample)
        self.samples.add(record.num_samples)
        if record.max_tokens is not None:
            self.max_tokens.add(record.max_tokens)
        if record.time_to_first_token is not None:
            self.seconds["first"].add(record.time_to_first_token)
        if record.seconds_per_token is not None:
            self.seconds["per_token"].add(record.seconds_per_token)
        seconds = record.seconds_in()
        if "prefill" in seconds:
            cached = sum(record.cached_tokens_by_tier.values())
            self.computed_tokens.add(record.num_prompt_tokens - cached)
        self._add_stages(seconds)

    def _add_stages(self, seconds: dict[str, float]) -> None:
        if "prefill" in seconds:
            self.seconds["queued"].add(seconds.get("queued", 0.0))
            self.seconds["prefill"].add(seconds["prefill"])
            self.seconds["inference"].add(seconds["prefill"] + seconds.get("decode", 0.0))
        if "decode" in seconds:
            self.seconds["decode"].add(seconds["decode"])


def _hits(stats: Stats) -> float:
    return float(stats["prefix"]["hits_by_tier"].get("device", 0))


def _hits_below(stats: Stats) -> float:
    return float(stats["prefix"]["hits"] - _hits(stats))


def _queries_below(stats: Stats) -> float:
    """Tokens that the device did not have, if there is a lower tier to ask."""
    return float(stats["prefix"]["queries"] - _hits(stats)) if stats["tiers"] else 0.0


def _usage(stats: Stats) -> float:
    return float(stats["blocks"]["in_use"] / stats["blocks"]["total"])


def _cache_config(stats: Stats) -> Labelled:
    blocks = stats["blocks"]
    return {(str(blocks["block_size"]), str(blocks["total"])): 1.0}


def _accepted_by_position(stats: Stats) -> Labelled:
    counts = stats["speculation"].get("accepted_by_position", [])
    return {(str(position),): count for position, count in enumerate(counts)}


def _adapters(stats: Stats) -> Labelled:
    """As vLLM has it: names are labels, and the value is the time."""
    adapters = stats.get("adapters")
    if not adapters:
        return {}
    waiting, running = (",".join(adapters[key][:MOST_NAMED]) for key in ("waiting", "running"))
    return {(str(adapters["max_loras"]), waiting, running): time.time()}


def _seconds(name: str) -> Any:
    return lambda requests: requests.seconds[name].as_dict()


ENGINE: list[Measure] = [
    Gauge("vllm:num_requests_running", "Sequences that run.", lambda s: s["requests"]["running"]),
    Gauge(
        "vllm:num_requests_waiting",
        "Sequences that wait for their turn or for blocks of a lower tier.",
        lambda s: s["requests"]["waiting"] + s["requests"]["loading"],
    ),
    Gauge("vllm:kv_cache_usage_perc", "Share of the blocks that is in use, 0 to 1.", _usage),
    Gauge("vllm:gpu_cache_usage_perc", "The same; the older name.", _usage),
    Gauge(
        "vllm:cache_config_info",
        "The pool's shape.",
        _cache_config,
        ("block_size", "num_gpu_blocks"),
    ),
    Gauge(
        "vllm:lora_requests_info",
        "Adapters of requests that run, and of those that wait; the value is the time.",
        _adapters,
        ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    Counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the cache.",
        lambda s: s["prefix"]["queries"],
    ),
    Counter("vllm:prefix_cache_hits", "Prompt tokens found on the device.", _hits),
    Counter(
        "vllm:external_prefix_cache_queries", "Tokens looked up in lower tiers.", _queries_below
    ),
    Counter("vllm:external_prefix_cache_hits", "Tokens found in lower tiers.", _hits_below),
    Counter(
        "vllm:num_preemptions", "Sequences that gave up their blocks.", lambda s: s["preemptions"]
    ),
    Counter("vllm:prompt_tokens", "Prompt tokens admitted.", lambda s: s["prefix"]["queries"]),
    Counter(
        "vllm:prompt_tokens_cached",
        "Those of them that need not be computed.",
        lambda s: s["prefix"]["hits"],
    ),
    Counter("vllm:generation_tokens", "Tokens generated.", lambda s: s["tokens"]["generated"]),
    Counter(
        "vllm:spec_decode_num_drafts",
        "Steps of a sequence that verified drafts.",
        lambda s: s["speculation"].get("steps", 0),
    ),
    Counter(
        "vllm:spec_decode_num_draft_tokens",
        "Draft tokens that were verified.",
        lambda s: s["speculation"]["drafted"],
    ),
    Counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        lambda s: s["speculation"]["accepted"],
    ),
    Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "The same by position, from 0.",
        _accepted_by_position,
        ("position",),
    ),
    Histogram("vllm:iteration_tokens_total", "Tokens of a step.", lambda s: s["step_tokens"]),
    Histogram(
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a sequence.",
        lambda s: s["token_seconds"],
    ),
    Histogram(
        "vllm:time_per_output_token_seconds",
        "Between two tokens of a sequence; the older name.",
        lambda s: s["token_seconds"],
    ),
]

REQUESTS: list[Measure] = [
    Counter(
        "vllm:request_success",
        "Requests that have ended, by how.",
        lambda t: {(reason,): count for reason, count in t.finished.items()},
        ("finished_reason",),
    ),
    Counter(
        "quire_adapter_requests",
        "Requests with an adapter that have ended, by its name.",
        lambda t: {(name,): count for name, count in t.adapters.items()},
        ("adapter",),
    ),
    Counter(
        "quire_adapter_generation_tokens",
        "Tokens generated with an adapter, by its name.",
        lambda t: {(name,): count for name, count in t.adapter_tokens.items()},
        ("adapter",),
    ),
    Counter(
        "quire_requests_refused",
        "Requests that were not let in, by why.",
        lambda t: {(reason,): count for reason, count in t.refused.items()},
        ("reason",),
    ),
    Histogram(
        "vllm:time_to_first_token_seconds", "From arrival to the first token.", _seconds("first")
    ),
    Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _seconds("all")),
    Histogram("vllm:request_queue_time_seconds", "Waiting for a turn.", _seconds("queued")),
    Histogram("vllm:request_prefill_time_seconds", "Computing the prompt.", _seconds("prefill")),
    Histogram("vllm:request_decode_time_seconds", "Computing the answer.", _seconds("decode")),
    Histogram("vllm:request_inference_time_seconds", "Computing at all.", _seconds("inference")),
    Histogram(
        "vllm:request_time_per_output_token_seconds",
        "A request's mean time between tokens.",
        _seconds("per_token"),
    ),
    Histogram(
        "vllm:request_prompt_tokens", "A request's prompt.", lambda t: t.prompt_tokens.as_dict()
    ),
    Histogram(
        "vllm:request_generation_tokens",
        "A request's answer.",
        lambda t: t.output_tokens.as_dict(),
    ),
    Histogram(
        "vllm:request_max_num_generation_tokens",
        "The longest of a request's n samples.",
        lambda t: t.longest_samples.as_dict(),
    ),
    Histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "What was computed of a request's prompt, and not found in a cache.",
        lambda t: t.computed_tokens.as_dict(),
    ),
    Histogram(
        "vllm:request_params_max_tokens", "max_tokens asked for.", lambda t: t.max_tokens.as_dict()
    ),
    Histogram("vllm:request_params_n", "n asked for.", lambda t: t.samples.as_dict()),
]
