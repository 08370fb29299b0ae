"""What a server needs of those who compute, be it one engine or several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quire.beam_params import BeamSearchParams
from quire.engine.limits import Limits
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.request_handle import RequestHandle
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.request_options import DEFAULT_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds


class Service(Protocol):
    died: asyncio.Event  # set when nobody is left, and nobody will come

    @property
    def limits(self) -> Limits: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def engines(self) -> Mapping[str, EngineLink]:
        """By name, those that can be asked how they are."""

    def members(self) -> list[dict[str, Any]]:
        """Of several: what each is called, and how it is."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now is begun, and does not wait for an engine to start."""

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has admitted yet."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those."""

    def submit(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        changed: asyncio.Event | None = None,
    ) -> RequestHandle: ...

    def close(self, handle: RequestHandle) -> None: ...

    def abandon(self, why: str) -> None: ...

    async def stop(self) -> int | None: ...
