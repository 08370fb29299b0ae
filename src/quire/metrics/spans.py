"""Requests as OpenTelemetry spans: one for the whole, and one in it for each stage.

Needs `pip install 'quire[otel]'` and an endpoint in OTEL_EXPORTER_OTLP_ENDPOINT. Spans are made
when a request has ended, from the times that were kept, so nothing waits for them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from quire.metrics.record import RequestRecord
from quire.metrics.stages import spans

log = logging.getLogger("quire")

CLOSE_S = 3.0
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NAMES = {"queued": "queue", "loading": "load"}  # a stage by the name of its span; others are alike


class Tracing:
    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("quire")

    def add(self, record: RequestRecord) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        offset = time.time() - time.monotonic()

        def nanoseconds(at: float) -> int:
            return int((at + offset) * 1e9)

        whole = self._tracer.start_span(
            "request", start_time=nanoseconds(record.arrived), attributes=_attributes(record)
        )
        inside = set_span_in_context(whole)
        for stage, start, end in spans(record.stages):
            part = self._tracer.start_span(
                NAMES.get(stage, stage), inside, start_time=nanoseconds(start)
            )
            part.end(nanoseconds(end))
        if record.error is not None:
            whole.set_status(Status(StatusCode.ERROR, record.error))
        whole.end(nanoseconds(record.ended))

    def close(self) -> None:
        """Send the spans that are left, for `CLOSE_S` at most."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def open_tracing(model_name: str) -> Tracing | None:
    """None where no endpoint is set; a warning where one is, and the packages are not there."""
    if not any(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("Spans are not sent: install them with pip install 'quire[otel]'.")
        return None
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "quire")}
    provider = TracerProvider(
        resource=Resource.create({**named, "gen_ai.request.model": model_name})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    cached = {f"quire.cached_tokens.{t}": n for t, n in record.cached_tokens_by_tier.items()}
    attributes = {
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "quire.request": record.id,
        **cached,
    }
    if record.miss_reason is not None:
        attributes["quire.miss_reason"] = record.miss_reason
    return attributes
