"""What Prometheus and the log see of a real server."""

from __future__ import annotations

import importlib.resources
import json
import re

import pytest
from patience import eventually
from prometheus_server import PrometheusServer
from server_process import ServerProcess


def prompt(number):
    return [100 + number] * 20 + list(range(200, 380))


@pytest.fixture(scope="module")
def busy(tiny, tmp_path_factory):
    """A server whose tiers are small, and which has been used."""
    folder = tmp_path_factory.mktemp("curves")
    disk = tmp_path_factory.mktemp("disk")
    server = ServerProcess.tiny(
        tiny,
        *("--num-blocks", "40", "--max-num-seqs", "2"),
        *("--host-cache-bytes", "256KiB", "--ssd-cache-dir", str(disk)),
        *("--ssd-cache-bytes", "4MiB", "--tensorboard", str(folder)),
    )
    server.folder = folder
    with server.http() as http:
        for number in [*range(6), *range(6)]:
            body = {"prompt": prompt(number), "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        long = {"prompt": prompt(0), "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())  # and leaves
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log


def dashboard():
    file = importlib.resources.files("quire.metrics") / "dashboards" / "quire.json"
    panels = json.loads(file.read_text())["panels"]
    return [t["expr"] for panel in panels for t in panel.get("targets", [])]


def test_prometheus_answers_all_that_the_dashboard_asks(busy, tmp_path):
    prometheus = PrometheusServer(tmp_path, busy.url)
    try:
        prometheus.wait_for("count_over_time(quire_num_blocks[1m]) > 2")
        expressions = dashboard()
        names = sorted(set(re.findall(r"(?:quire_|vllm:)\w+", " ".join(expressions))))
        assert len(names) > 40
        for name in names:
            prometheus.wait_for(name)
        for expression in expressions:
            filled = expression.replace("$__rate_interval", "1m").replace("$model_name", ".*")
            prometheus.wait_for(filled)
        [used] = prometheus.wait_for('vllm:request_success_total{finished_reason="length"}')
        assert used["metric"]["model_name"] == "tiny" and float(used["value"][1]) == 12
        [hits] = prometheus.wait_for('quire_hit_tokens_total{tier="ssd"}')
        assert float(hits["value"][1]) > 0
    finally:
        prometheus.stop()


def test_counts_agree_with_what_was_asked(busy):
    with busy.http() as http:
        text = http.get("/metrics").text
    values = dict(re.findall(r"^((?:quire_|vllm:)\w+)\{[^}]*\} (\S+)$", text, re.M))
    assert float(values["vllm:prompt_tokens_total"]) == 13 * 200
    assert float(values["vllm:generation_tokens_total"]) >= 36
    assert float(values["vllm:time_to_first_token_seconds_count"]) >= 12
    assert float(values["quire_kv_gather_latency_count"]) > 0


def logged(server):
    lines = server.log.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def test_one_line_of_json_for_each_request(busy):
    eventually(lambda: len(logged(busy)) >= 13)  # that a client has left is noticed a moment later
    lines = logged(busy)
    assert len(lines) == 13
    first, again, left = lines[0], lines[6], lines[12]
    assert first["prompt_tokens"] == 200 and first["output_tokens"] == 3
    assert first["cached_tokens"] == 0 and "nothing is cached" in first["missed"]
    assert first["finish_reason"] == "length" and 0 < first["first_token_s"] <= first["seconds"]
    assert {"queued", "prefill", "decode"} <= set(first["stages"])
    assert again["cached_tokens"] == sum(again["cached_by_tier"].values()) > 0
    assert left["finish_reason"] == "abort" and left["output_tokens"] >= 1
    assert 0 < left["first_token_s"] <= left["seconds"]


def test_curves_are_drawn(busy):
    [file] = busy.folder.iterdir()
    assert file.name.startswith("events.out.tfevents")
