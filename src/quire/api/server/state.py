"""The objects that all routes share, and how a route gets them."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Header, Request

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.server.admission import Admission
from quire.api.server.answers.logprobs import TokenNames
from quire.api.server.answers.prompts import PromptReader
from quire.api.server.answers.tool_use import ToolUse
from quire.api.server.chat_template_setting import read_chat_template
from quire.api.server.errors import ApiError
from quire.api.server.keys import CALLER, Keys, Tenant
from quire.api.server.models import ServedModels
from quire.api.server.observer import Observer
from quire.api.server.responses.store import ResponseStore
from quire.api.server.schema.unknown_fields import UnknownFieldLog
from quire.api.server.settings import ServerConfig
from quire.engine.process.request_handle import RequestHandle
from quire.engine.process.service import Service
from quire.models.pooling.inputs import TextReader
from quire.request_options import RequestOptions

if TYPE_CHECKING:
    from quire.api.server.batch.service import Batches


class ServerState:
    def __init__(self, settings: ServerConfig, client: Service, model: str, keys: Keys) -> None:
        self.settings = settings
        self.client = client
        if settings.chat_template is not None and client.tokenizer is not None:
            client.tokenizer.chat_template = read_chat_template(settings.chat_template)
        self.keys = keys
        self.model_names = tuple(settings.served_model_name) or (model,)
        self.models = ServedModels(self.model_names, client)
        self.admission = Admission(settings, client)
        self.observer = Observer(settings, client, self.model_names[0], self.admission.refused)
        self.reader = PromptReader(client.tokenizer, client.limits)
        self.names = TokenNames(client.tokenizer)
        template = client.tokenizer.chat_template if client.tokenizer is not None else None
        self.answer_format = AnswerFormat.choose(
            template, settings.tool_format, settings.reasoning_parser
        )
        self.unknown_fields = UnknownFieldLog()
        self.responses = ResponseStore(settings)
        self.started = int(time.time())
        self._batches: Batches | None = None

    @property
    def batches(self) -> Batches:
        """Files and batches; ApiError if the server keeps none."""
        if self._batches is None:
            raise ApiError(
                404,
                "Files and batches need a folder; start the server with --batch-dir.",
                code="batch_dir_needed",
            )
        return self._batches

    @batches.setter
    def batches(self, batches: Batches) -> None:
        self._batches = batches

    async def stop_batches(self) -> None:
        """Lines that are being answered are answered again by the next server."""
        if self._batches is not None:
            await self._batches.stop()

    def served(self, model: str | None) -> str:
        """The name to answer with; ApiError for a model that is not here."""
        return self.models.served(model)

    def served_to_write(self, model: str | None) -> str:
        """The same; RequestError if the model writes no text, before it is asked for a template."""
        name = self.served(model)
        self.client.limits.check_writes()
        return name

    def tool_use(self, tools: Any, choice: Any, several: bool | None) -> ToolUse:
        tokenizer = self.client.tokenizer
        return ToolUse.read(tokenizer, self.answer_format, tools, choice, several)

    @cached_property
    def text_reader(self) -> TextReader:
        """Of a model that gives embeddings or classes."""
        facts, client = self.client.pooling, self.client
        assert facts is not None
        return TextReader(client.tokenizer, facts, client.limits.max_model_len)

    def note_admission(self, handle: RequestHandle, options: RequestOptions) -> None:
        """How long a request in the background has waited says nothing of the next client's."""
        if handle.admission is not None and not options.background:
            self.admission.note_wait(handle.admission.waited_s)


# Both are coroutines because FastAPI would run plain functions in a thread.
async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state)]


async def _caller(
    request: Request,
    state: State,
    authorization: Annotated[str | None, Header()] = None,
    x_api_key: Annotated[str | None, Header()] = None,
) -> Tenant:
    if (tenant := request.scope.get(CALLER)) is not None:
        return cast(Tenant, tenant)
    return state.keys.tenant(authorization, x_api_key)


# A route with this argument needs a key, where keys are set.
Caller = Annotated[Tenant, Depends(_caller)]
