"""Spans and curves, which are made where they are asked for."""

from __future__ import annotations

import gzip
import re
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_model import make_engine
from patience import PATIENCE_S

from quire.engine.observe.introspection import engine_stats
from quire.errors import ConfigError
from quire.histogram import BucketCounts
from quire.metrics.measure import Counter, Gauge, Histogram
from quire.metrics.quire_metrics import QUIRE
from quire.metrics.record import RequestRecord
from quire.metrics.spans import Tracing, open_tracing
from quire.metrics.tensorboard import Curves
from quire.metrics.vllm_metrics import ENGINE, REQUESTS, RequestStats

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def record(**changes):
    now = time.monotonic()
    stages = [
        "queued",
        "loading",
        "prefill",
        "decode",
        "preempted",
        "prefill",
        "decode",
        "finished",
    ]
    facts = {
        "id": "7",
        "arrived": now - 8.0,
        "ended": now,
        "num_prompt_tokens": 30,
        "num_output_tokens": 5,
        "cached_tokens_by_tier": {"host": 16},
        "stages": [(stage, now - 8.0 + at) for at, stage in enumerate(stages)],
    }
    return RequestRecord(**facts | changes)


def test_a_span_for_each_stage():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Tracing(provider).add(record(error="it broke", finish_reason="error"))
    *parts, whole = exporter.get_finished_spans()
    assert [part.name for part in parts] == [
        "queue",
        "load",
        "prefill",
        "decode",
        "preempted",
        "prefill",
        "decode",
    ]
    assert whole.name == "request" and not whole.status.is_ok
    assert whole.attributes["quire.cached_tokens.host"] == 16
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    assert parts[0].end_time == parts[1].start_time
    assert abs(whole.end_time / 1e9 - time.time()) < PATIENCE_S
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(8.0, abs=0.01)


def test_no_spans_without_an_endpoint(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert open_tracing("tiny") is None


class Collector(BaseHTTPRequestHandler):
    """Takes spans as a real one does, and keeps what came."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_spans_are_sent_to_the_endpoint(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    tracing = open_tracing("tiny")
    tracing.add(record())
    tracing.close()  # which sends what waits
    server.shutdown()
    [(path, body)] = server.received
    assert path == "/v1/traces" and b"preempted" in body and b"quire" in body


def written(folder):
    """All that a folder of TensorBoard's files has: by name, what was written at each step."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:  # length and its checksum, an event and its checksum
            (size,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                said = value.histo if value.HasField("histo") else value.simple_value
                found.setdefault(value.tag, []).append(said)
    return found


def test_curves_are_what_metrics_has(tmp_path, capfd):
    """Every measure of /metrics, under a name that the writer does not complain of."""
    clock = [100.0]
    engine = make_engine(host_slots=4)
    curves, requests = Curves(str(tmp_path), lambda: clock[0]), RequestStats()
    stats = engine_stats(engine)
    stats["tiers"]["host"]["drops"]["no slot free, again"] = 1
    attention = BucketCounts([0.001, 0.01])
    curves.see(stats | {"attention_seconds": attention.as_dict()}, requests)
    clock[0] += 10.0
    requests.add(record())
    for seconds in (0.0005, 0.0006, 0.5):
        attention.add(seconds)
    stats |= {"attention_seconds": attention.as_dict()}
    stats |= {"blocks": stats["blocks"] | {"allocated": stats["blocks"]["allocated"] + 40}}
    curves.see(stats, requests)
    curves.add(record())
    curves.close()
    found = written(tmp_path)
    for measure in (*QUIRE, *ENGINE, *REQUESTS):
        name = measure.name.replace(":", "/")
        empty = isinstance(measure, Histogram) and not sum(_counts(measure, stats, requests))
        labelled = isinstance(measure, Counter | Gauge) and measure.labels
        wanted = measure.name != "vllm:cache_config_info" and not empty and not labelled
        assert not wanted or any(tag.startswith(name) for tag in found), name
    assert found["quire_alloc_rate"] == [0.0, pytest.approx(4.0)]
    [gather] = found["quire_kv_gather_latency"]
    assert gather.num == 3 and gather.sum == pytest.approx(0.5011)
    assert list(gather.bucket) == [2, 0, 1] and list(gather.bucket_limit) == [0.001, 0.01, 0.02]
    assert found["vllm/time_to_first_token_seconds"][0].num == 1
    assert "quire_tier_drops/host/no_slot_free__again_per_second" in found
    assert "quire_refcount_hist/65_or_more" in found and "request/first_token_s" in found
    assert not [name for name in found if re.search(r"[^-/\w.]", name)]
    assert "illegal" not in "".join(capfd.readouterr())


def _counts(measure, stats, requests):
    facts = requests if measure in REQUESTS else {**stats, "rate": 0.0}
    return measure.read(facts)["counts"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Curves(str(tmp_path / "file"))
