"""All texts of one HTTP request that are only read: one request of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from fastapi import Request

from quire.api.server.errors import bad_request
from quire.api.server.http.disconnects import while_connected
from quire.api.server.http.request_ids import answer_id
from quire.api.server.keys import Tenant
from quire.api.server.schema.pooling import PoolingFields
from quire.api.server.state import ServerState
from quire.engine.limits import WRITES_TEXT, checked_ids
from quire.engine.pooling.finish import check_params
from quire.engine.pooling.request import TextsAsked, Vector, Vectors
from quire.engine.process.request_handle import RequestHandle
from quire.errors import RequestError
from quire.kv.index import TokenIds
from quire.models.pooling.facts import PoolingFacts
from quire.models.pooling.inputs import TextInput, TextReader
from quire.pooling_params import PoolingParams

LONG_TEXTS = 20_000  # characters from which tokenizing would hold up other requests

T = TypeVar("T")


class Pooled:
    """What one request has in the engine; `vectors` computes it."""

    def __init__(
        self, state: ServerState, body: PoolingFields, caller: Tenant, prefix: str
    ) -> None:
        self.model = state.served(body.model)
        if state.models.adapter(body.model) is not None:
            base = state.models.base_names[0]
            says = f"Adapters are not applied to vectors and scores; ask for {base!r}."
            raise bad_request(says, param="model")
        state.unknown_fields.note(body.unknown_fields())
        self.id = answer_id(prefix)
        self.facts = facts_of(state)
        self._state = state
        self._options = body.options(caller, self.id, state.settings.max_queue_seconds)
        self._caller = caller
        self._parts: list[tuple[RequestHandle, TextsAsked]] = []
        self.num_tokens = 0

    async def read(self, read: Callable[[TextReader], T], texts: Sequence[Any]) -> T:
        """What `read` makes of texts; in a thread, if they are long."""
        reader = self._state.text_reader
        if sum(map(len, texts)) < LONG_TEXTS:
            return read(reader)
        return await asyncio.to_thread(read, reader)

    async def vectors(
        self, request: Request, inputs: Sequence[TextInput], params: PoolingParams
    ) -> list[Vector]:
        """One for each; whatever has not ended when the client leaves is aborted."""
        limits = self._state.client.limits
        check_params(params, self.facts)
        ids = [checked_ids(each.token_ids, limits.vocab_size) for each in inputs]
        limits.check_text(max(map(len, ids)), self._options)
        self.num_tokens = sum(map(len, ids))
        parts = []
        for start, end in pairwise(self._cuts(len(ids))):
            seconds = [each.second_text for each in inputs[start:end]]
            asked = TextsAsked(params, [len(each) for each in ids[start:end]], seconds)
            parts.append((np.concatenate(ids[start:end]), asked))
        return await while_connected(request.receive, self._compute(parts))

    def _cuts(self, count: int) -> list[int]:
        """A part for each engine: with one engine, all texts are one request of it."""
        num_parts = min(count, max(1, len(self._state.client.engines)))
        return [count * i // num_parts for i in range(num_parts + 1)]

    async def _compute(self, parts: list[tuple[TokenIds, TextsAsked]]) -> list[Vector]:
        state, changed = self._state, asyncio.Event()
        try:
            # Nothing is awaited between the check and the start: no other takes the place.
            if not self._options.background:
                state.admission.check(len(parts), self.num_tokens)
            for ids, asked in parts:
                handle = state.client.submit(ids, asked, self._options, changed=changed)
                self._parts.append((handle, asked))
            return await self._all(changed)
        finally:
            for handle, asked in self._parts:
                state.client.close(handle)
                state.observer.ended(self._options, handle, asked, self._caller.name)

    async def _all(self, changed: asyncio.Event) -> list[Vector]:
        found: dict[int, Vectors] = {}
        while len(found) < len(self._parts):
            await changed.wait()
            changed.clear()
            for i, (handle, _) in enumerate(self._parts):
                update = handle.take()
                if update is not None and update.pooled is not None:
                    found[i] = update.pooled
                    self._state.note_admission(handle, self._options)
        return [vector for i in range(len(found)) for vector in found[i]]

    def head(self, **more: Any) -> dict[str, Any]:
        return {"id": self.id, **more, "created": int(time.time()), "model": self.model}

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


def facts_of(state: ServerState) -> PoolingFacts:
    """RequestError where the model writes text."""
    facts = state.client.pooling
    if facts is None:
        raise RequestError(WRITES_TEXT)
    return facts
