"""What a server needs to serve requests, be it one engine or several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quire.engine.limits import Limits
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.messages import Params
from quire.engine.process.request_handle import RequestHandle
from quire.models.pooling.facts import PoolingFacts
from quire.models.text.tokenizer import Tokenizer
from quire.request_options import DEFAULT_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds


class Service(Protocol):
    died: asyncio.Event  # set when no engine is left, and none will be started

    @property
    def limits(self) -> Limits: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def pooling(self) -> PoolingFacts | None:
        """Of a model that gives embeddings or classes."""

    @property
    def engines(self) -> Mapping[str, EngineLink]:
        """By name, the engines that answer calls."""

    def members(self) -> list[dict[str, Any]]:
        """The name and the state of each engine, where there are several."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now is begun, and does not wait for an engine to start."""

    @property
    def num_open(self) -> int:
        """Requests whose handles are not closed."""

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has admitted yet."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""

    def submit(
        self,
        prompt_ids: TokenIds,
        params: Params,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        changed: asyncio.Event | None = None,
    ) -> RequestHandle: ...

    def close(self, handle: RequestHandle) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def stop(self) -> int | None: ...
