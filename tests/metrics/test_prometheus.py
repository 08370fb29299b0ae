"""Plain data becomes the metrics that dashboards read."""

from __future__ import annotations

import importlib.resources
import json
import logging
import re
from pathlib import Path

import pytest
from fake_model import greedy, make_engine, run
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.observe.introspection import engine_stats
from quire.metrics.measure import names
from quire.metrics.prometheus import MEASURES, Metrics
from quire.metrics.record import RequestRecord
from quire.metrics.request_log import log_request


def record(**changes):
    stages = [("queued", 10.0), ("prefill", 10.5), ("decode", 11.5), ("finished", 13.5)]
    facts = {
        "id": "7",
        "arrived": 9.5,
        "ended": 14.0,
        "num_prompt_tokens": 300,
        "num_output_tokens": 5,
        "finish_reason": "length",
        "max_tokens": 5,
        "cached_tokens_by_tier": {"device": 32, "host": 64},
        "miss_reason": "token 97 differs from what is cached",
        "stages": stages,
    }
    return RequestRecord(**facts | changes)


def values(metrics):
    """By name and labels, without the two that all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = (sample.name, *(labels[name] for name in sorted(labels)))
            found[key] = sample.value
            assert sample.labels["model_name"] == "tiny"
    return found


def used_engine(**options):
    engine = make_engine(num_blocks=16, **options)
    for name in ("a", "b"):
        engine.add_request(name, list(range(1, 10)), greedy(4))
        run(engine)
    engine.add_request("c", [5] * 6, greedy(30))
    for _ in range(3):
        engine.step()
    return engine


def test_the_engine_as_it_is():
    engine, metrics = used_engine(), Metrics("tiny")
    metrics.see(engine_stats(engine))
    found = values(metrics)
    stats = engine_stats(engine)
    assert found["quire_num_free_blocks",] == stats["blocks"]["free"]
    assert found["quire_num_in_use_blocks",] == stats["blocks"]["in_use"] > 0
    assert found["quire_num_cached_blocks",] == stats["blocks"]["cached"] > 0
    assert found["quire_hit_tokens_total", "device"] == 8
    assert found["vllm:prefix_cache_hits_total",] == 8
    assert found["vllm:prompt_tokens_total",] == 24
    assert found["vllm:num_requests_running",] == 1
    in_use = stats["blocks"]["in_use"] / stats["blocks"]["total"]
    assert found["vllm:kv_cache_usage_perc",] == found["vllm:gpu_cache_usage_perc",] == in_use
    assert found["quire_refcount_hist", "1"] == stats["blocks"]["in_use"]
    assert found["vllm:iteration_tokens_total_count",] == stats["steps"]
    assert found["vllm:generation_tokens_total",] == stats["tokens"]["generated"]
    held, length = stats["blocks"]["in_use"] * 4, engine.scheduler.running[0].table.length
    assert found["quire_fragmentation",] == pytest.approx((held - length) / held)
    matched, allocated = stats["blocks"]["matched"], stats["blocks"]["allocated"]
    assert found["quire_reuse_rate",] == pytest.approx(matched / (matched + allocated))
    tokens_behind_the_first = stats["tokens"]["generated"] - 3
    assert found["vllm:inter_token_latency_seconds_count",] == tokens_behind_the_first


def test_tiers_by_direction():
    engine, metrics = used_engine(host_slots=8), Metrics("tiny")
    engine.scheduler.tiering.store.flush(PATIENCE_S)
    metrics.see(engine_stats(engine))
    found, host = values(metrics), engine_stats(engine)["tiers"]["host"]
    assert found["quire_tier_bytes_total", "write", "host"] == host["writes"]["bytes"] > 0
    assert found["quire_tier_seconds_total", "write", "host"] > 0
    assert found["quire_tier_blocks", "host"] == 8
    assert found["quire_tier_used_blocks", "host"] == host["used"]
    assert found["quire_hit_tokens_total", "host"] == 0


def test_requests_by_their_stages():
    metrics = Metrics("tiny")
    metrics.add(record())
    metrics.add(record(finish_reason="abort", stages=[("queued", 10.0)], num_output_tokens=0))
    found = values(metrics)
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:request_success_total", "error"] == 0
    assert found["vllm:time_to_first_token_seconds_sum",] == pytest.approx(2.0)
    assert found["vllm:time_to_first_token_seconds_count",] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "2.5"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "1.0"] == 0
    assert found["vllm:e2e_request_latency_seconds_sum",] == pytest.approx(9.0)
    assert found["vllm:request_queue_time_seconds_sum",] == pytest.approx(0.5)
    assert found["vllm:request_prefill_time_seconds_sum",] == pytest.approx(1.0)
    assert found["vllm:request_decode_time_seconds_sum",] == pytest.approx(2.0)
    assert found["vllm:request_inference_time_seconds_sum",] == pytest.approx(3.0)
    assert found["vllm:request_time_per_output_token_seconds_sum",] == pytest.approx(0.5)


def test_the_longest_of_a_requests_samples():
    metrics = Metrics("tiny")
    metrics.add(record(num_samples=3, num_output_tokens=12, longest_sample=7))
    found = values(metrics)
    assert found["vllm:request_generation_tokens_sum",] == 12
    assert found["vllm:request_max_num_generation_tokens_sum",] == 7
    assert found["vllm:request_max_num_generation_tokens_count",] == 1


def test_two_servers_in_one_process():
    first, second = Metrics("tiny"), Metrics("tiny")
    first.add(record())
    assert values(first)["vllm:request_success_total", "length"] == 1
    assert values(second)["vllm:request_success_total", "length"] == 0


def test_the_rate_of_allocation():
    now = [100.0]
    metrics, stats = Metrics("tiny", clock=lambda: now[0]), engine_stats(make_engine())
    for seconds, allocated, rate in [(1, 50, 50), (1, 50, 25), (30, 80, 1), (1, 10, 0)]:
        now[0] += seconds
        stats["blocks"]["allocated"] = allocated
        metrics.see(stats)
        assert values(metrics)["quire_alloc_rate",] == pytest.approx(rate, rel=0.05)


def test_every_name_of_the_dashboard_is_measured():
    file = importlib.resources.files("quire.metrics") / "dashboards" / "quire.json"
    board = json.loads(file.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    used = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in re.findall(r"(?:quire_|vllm:)\w+", text)
    }
    known = {name.removesuffix("_count") for name in names(MEASURES)}
    assert used <= known
    wanted = {
        "num_free_blocks",
        "num_cached_blocks",
        "num_in_use_blocks",
        "alloc_rate",
        "reuse_rate",
        "fragmentation",
        "refcount_hist",
        "gpu_mem_used",
        "kv_gather_latency",
    }
    assert {f"quire_{name}" for name in wanted} <= used
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_name_is_in_the_docs():
    told = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in names(MEASURES):
        short = name.removesuffix("_count").removeprefix("quire_").removeprefix("vllm:")
        assert f"`{short}`" in told, name


def test_one_line_for_each_request(caplog):
    with caplog.at_level(logging.INFO, "quire.requests"):
        log_request(record(id="cmpl-7", number=52, tenant="key-1234"))
    [line] = caplog.messages
    told = json.loads(line)
    assert told == {
        "request": "cmpl-7",
        "number": 52,
        "tenant": "key-1234",
        "prompt_tokens": 300,
        "output_tokens": 5,
        "cached_tokens": 96,
        "cached_by_tier": {"device": 32, "host": 64},
        "missed": "token 97 differs from what is cached",
        "finish_reason": "length",
        "first_token_s": 2.0,
        "seconds": 4.5,
        "stages": {"queued": 0.5, "prefill": 1.0, "decode": 2.0},
    }
