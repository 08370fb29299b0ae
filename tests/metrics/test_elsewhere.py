"""Spans and curves, which are made where they are asked for."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_model import make_engine
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from patience import PATIENCE_S

from quire.engine.observe.introspection import engine_stats
from quire.errors import ConfigError
from quire.metrics.record import RequestRecord
from quire.metrics.spans import Tracing, open_tracing
from quire.metrics.tensorboard import Curves


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


def test_curves_are_written(tmp_path):
    engine, curves = make_engine(host_slots=4), Curves(str(tmp_path))
    curves.see(engine_stats(engine))
    curves.add(record())
    curves.close()
    [file] = tmp_path.iterdir()
    written = file.read_bytes()
    for name in (b"quire_num_free_blocks", b"vllm/num_requests_running", b"request/first_token_s"):
        assert name in written
    assert b"quire_hit_tokens/host_per_second" in written


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Curves(str(tmp_path / "file"))
