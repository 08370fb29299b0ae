"""What can be seen of the server: metrics, the log line, spans, curves, the page's data."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from quire.api.server.errors import ApiError
from quire.api.server.keys import Tenant
from quire.api.server.settings import ServerConfig
from quire.engine.pooling.request import TextsAsked
from quire.engine.process.request_handle import RequestHandle
from quire.engine.process.service import Service
from quire.errors import QuireError
from quire.metrics.prometheus import Metrics
from quire.metrics.record import RequestRecord
from quire.metrics.request_log import log_request
from quire.metrics.spans import open_tracing
from quire.metrics.tensorboard import Curves
from quire.params import SamplingParams
from quire.request_options import RequestOptions

log = logging.getLogger("quire.server")

FRESH_S = 0.2  # for so long an answer of the engine's is used again: many clients may ask
SCRAPE_S = 2.0  # a long step may be under way; then a scraper gets what was known before
LOOK_S = 30.0  # for the page's data
CURVES_EVERY_S = 5.0
MOST_FIRST_TOKENS = 256
FIRST = "0"
DOWN = "There is no replica {!r} up; ask for another one, or later."
BUSY = "The engine is in a long step and answers after it; ask again."


class Observer:
    def __init__(
        self, settings: ServerConfig, client: Service, model: str, refused: Counter[str]
    ) -> None:
        self._settings = settings
        self._client = client
        self.metrics = Metrics(model)
        self.metrics.requests.refused = refused
        # The newest, each as: when, after how long, by which engine, for which tenant.
        self._first_tokens: deque[tuple[float, float, str, str]] = deque(maxlen=MOST_FIRST_TOKENS)
        self._tracing = open_tracing(model)
        self._curves = Curves(settings.tensorboard) if settings.tensorboard else None
        self._drawing: asyncio.Task[None] | None = None
        self._answers: dict[str, _Answer] = {}

    async def start(self) -> None:
        if self._curves is not None and self._client.pooling is None:
            self._drawing = asyncio.create_task(self._draw(self._curves))

    def close(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
        for sink in (self._curves, self._tracing):
            if sink is not None:
                sink.close()

    # --- requests -----------------------------------------------------------------------------

    def ended(
        self,
        options: RequestOptions,
        handle: RequestHandle,
        params: SamplingParams | TextsAsked,
        tenant: str,
        shown: Sequence[int] = (),
    ) -> None:
        """Record a request that has ended.

        `shown`: how many tokens of each sample the client has seen, if it left before the last one.
        """
        record = _record(options, handle, params, tenant, shown)
        self.metrics.add(record)
        if record.time_to_first_token is not None:
            first = record.ended, record.time_to_first_token, record.engine, tenant
            self._first_tokens.append(first)
        for sink in (self._curves, self._tracing):
            if sink is not None:
                sink.add(record)
        if self._settings.log_requests:
            log_request(record)

    def first_tokens(self, engine: str, caller: Tenant) -> list[tuple[float, float]]:
        """Times of first tokens, and how long they took: of the caller's requests, or of all."""
        return [
            (at, seconds)
            for at, seconds, whose, tenant in self._first_tokens
            if whose == engine and (caller.sees_all or tenant == caller.name)
        ]

    # --- the engine ---------------------------------------------------------------------------

    async def stats(self, engine: str = FIRST, patience: float = LOOK_S) -> dict[str, Any]:
        stats: dict[str, Any] = await self.ask("stats", engine, patience)
        self.metrics.see(stats, engine)
        return stats

    async def metrics_text(self) -> bytes:
        """For Prometheus; an engine that is busy or gone is shown with its last stats."""
        asking = (self.stats(engine, SCRAPE_S) for engine in self._client.engines)
        await asyncio.gather(*asking, return_exceptions=True)
        return self.metrics.text()

    async def ask(
        self, name: str, engine: str = FIRST, patience: float = LOOK_S, **args: Any
    ) -> Any:
        """One of an engine's views; clients that ask for the same at once get the same answer."""
        client = self._client.engines.get(engine)
        if client is None:
            raise ApiError(503, DOWN.format(engine[:20]), code="replica_down")
        key = f"{engine} {name}{sorted(args.items())}"
        answer = self._answers.get(key)
        if answer is None or answer.is_old:
            self._forget_old()
            asking = asyncio.ensure_future(client.call(name, **args))
            asking.add_done_callback(_seen)
            answer = self._answers[key] = _Answer(asking)
        try:
            return await asyncio.wait_for(asyncio.shield(answer.asking), patience)
        except asyncio.TimeoutError:
            raise ApiError(503, BUSY, code="busy", headers={"Retry-After": "1"}) from None

    def _forget_old(self) -> None:
        old = [key for key, answer in self._answers.items() if answer.is_old]
        for key in old:
            del self._answers[key]

    async def _draw(self, curves: Curves) -> None:
        while True:
            await asyncio.sleep(CURVES_EVERY_S)
            with suppress(QuireError):
                curves.see(await self.stats(), self.metrics.requests)


class _Answer:
    """A question to the engine, and its answer, which serves all who ask until it is old."""

    def __init__(self, asking: asyncio.Future[Any]) -> None:
        self.asking = asking
        self._answered = 0.0
        asking.add_done_callback(self._note)

    def _note(self, _: asyncio.Future[Any]) -> None:
        self._answered = time.monotonic()

    @property
    def is_old(self) -> bool:
        return self.asking.done() and time.monotonic() > self._answered + FRESH_S


def _seen(asking: asyncio.Future[Any]) -> None:
    """The caller that waits gets the failure; without one, asyncio would log it."""
    if not asking.cancelled():
        asking.exception()


def _record(
    options: RequestOptions,
    handle: RequestHandle,
    params: SamplingParams | TextsAsked,
    tenant: str,
    shown: Sequence[int],
) -> RequestRecord:
    admission, ending, lora = handle.admission, handle.ending, options.lora_request
    reason = "error" if handle.error else ending.finish_reason if ending else "abort"
    return RequestRecord(
        id=options.name,
        adapter=lora.lora_name if lora is not None else "",
        number=handle.number,
        engine=handle.engine or FIRST,
        arrived=handle.arrived,
        ended=handle.finished_at or time.monotonic(),
        num_prompt_tokens=handle.num_prompt_tokens,
        num_output_tokens=ending.output_tokens if ending else sum(shown),
        longest_sample=ending.longest_sample if ending else max(shown, default=0),
        finish_reason=reason,
        num_samples=params.num_samples,
        max_tokens=params.max_tokens,
        cached_tokens_by_tier=admission.cached_tokens_by_tier if admission else {},
        miss_reason=admission.miss_reason if admission else None,
        error=handle.error,
        tenant=tenant,
        stages=ending.stages if ending else _stages_seen(handle),
    )


def _stages_seen(handle: RequestHandle) -> list[tuple[str, float]]:
    """The stages of a request whose client left, as far as the server was told of them."""
    stages = [("queued", handle.arrived)]
    if handle.admission is not None:
        stages.append(("prefill", handle.arrived + handle.admission.waited_s))
        if handle.first_update_at is not None:
            stages.append(("decode", handle.first_update_at))
    return [*stages, ("finished", handle.finished_at or time.monotonic())]
