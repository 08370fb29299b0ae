"""All texts of one HTTP request that are only read: submitted together, answered together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request

from quire.api.server.errors import bad_request
from quire.api.server.http.disconnects import while_connected
from quire.api.server.http.request_ids import answer_id
from quire.api.server.keys import Tenant
from quire.api.server.schema.pooling import PoolingFields
from quire.api.server.state import ServerState
from quire.engine.limits import WRITES_TEXT, checked_ids
from quire.engine.pooling.finish import check_params
from quire.engine.pooling.request import Vector
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
        self._handles: list[tuple[RequestHandle, PoolingParams]] = []
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
        for each in ids:
            limits.check_text(each, self._options)
        self.num_tokens = sum(map(len, ids))
        asked = [replace(params, second_text=each.second_text) for each in inputs]
        return await while_connected(request.receive, self._compute(ids, asked))

    async def _compute(self, ids: list[TokenIds], params: list[PoolingParams]) -> list[Vector]:
        state, changed = self._state, asyncio.Event()
        try:
            # Nothing is awaited between the check and the start: no other takes the place.
            if not self._options.background:
                state.admission.check(len(ids), self.num_tokens)
            for each, asked in zip(ids, params, strict=True):
                handle = state.client.submit(each, asked, self._options, changed=changed)
                self._handles.append((handle, asked))
            return await self._all(changed)
        finally:
            for handle, asked in self._handles:
                state.client.close(handle)
                state.observer.ended(self._options, handle, asked, self._caller.name)

    async def _all(self, changed: asyncio.Event) -> list[Vector]:
        found: dict[int, Vector] = {}
        waiting = {i: handle for i, (handle, _) in enumerate(self._handles)}
        while waiting:
            await changed.wait()
            changed.clear()
            for i, handle in list(waiting.items()):
                update = handle.take()
                if update is not None and update.pooled is not None:
                    found[i] = update.pooled
                    del waiting[i]
                    self._state.note_admission(handle)
        return [found[i] for i in range(len(found))]

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
