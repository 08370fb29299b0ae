"""The Python interface for event loops: each request is an async iterator of its outputs.

    loop A   generate ─┐                                    ┌─► outputs of A's requests
    loop B   generate ─┴─► thread with the engine's client ─┤
                              │        ▲                    └─► outputs of B's requests
                              ▼        │ a socket
                           process of the engine: steps

The engine has a process of its own, the one that `quire serve` uses: a step takes neither a
caller's loop nor its interpreter's lock. The client of that process lives in a small thread, so
that callers may come from any loop, from one after another, or from several at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from quire.api.async_llm.loop_thread import LoopThread
from quire.api.async_llm.request import GrowingOutput, Mailbox
from quire.api.llm import ChatMessage
from quire.api.prompts import Prompt, plain_prompt
from quire.api.reasoning.python_chats import ThinkingChat, chat_params
from quire.api.server.answers.prompts import Prompt as ReadPrompt
from quire.api.server.answers.prompts import PromptReader
from quire.config import EngineConfig
from quire.engine.outputs import RequestOutput
from quire.engine.process.client import EngineClient
from quire.engine.process.request_handle import EngineDied
from quire.errors import EngineFailed, QuireError, RequestError
from quire.lora_request import LoRARequest
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.request_options import RequestOptions

CLOSED = "This AsyncLLM is closed; make a new one."
DIED = "The engine's process has ended; see its log, and make a new AsyncLLM."

T = TypeVar("T")
Read = Callable[[PromptReader], Coroutine[Any, Any, ReadPrompt]]


class AsyncLLM:
    """A model, ready to generate for any number of tasks. Use it in `async with`, or `close` it.

    It takes every setting of `EngineConfig`, as `LLM` does. The model is loaded in the background:
    `async with` and the first request wait for it, and raise what went wrong.
    """

    def __init__(self, model: str = "smollm2", *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.create(model=model, **settings)
        self._numbers = count(1)
        self._open: dict[str, OpenRequest] = {}  # by id; only the background thread touches it
        self._background = LoopThread(CLOSED)
        self._starting = self._background.start(partial(_start, self.config, use_tqdm))
        self._finalizer = weakref.finalize(self, _finish, self._background, self._starting)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self._started()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine's process; open requests end with a `QuireError`.

        Blocks on their way to a disk or a remote cache are written first, within half a minute.
        """
        self._finalizer.detach()
        thread = _finish(self._background, self._starting)
        await asyncio.to_thread(thread.join)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: each output has the whole text so far, the last one is `finished`.

        A loop that is slower than the engine gets the tokens of several steps at once. Without
        `stream` there is one output, at the end. Closing the iterator, or cancelling its task,
        aborts the request. What goes wrong with it is raised here, and concerns no other request.
        """
        options = RequestOptions(
            stream=stream, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )

        async def read(reader: PromptReader) -> ReadPrompt:
            return await reader.read(plain_prompt(prompt))

        return self._outputs(read, sampling_params, request_id, options)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation through the model's chat template; the rest is as in `generate`.

        Of a model that thinks, `text` is the words and `reasoning` the thoughts; a form that
        `structured` asks for begins behind them.
        """
        options = RequestOptions(
            stream=stream, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )

        async def read(reader: PromptReader) -> ReadPrompt:
            return await reader.read_chat([*messages], variables=chat_template_kwargs)

        return self._outputs(read, sampling_params, request_id, options, is_chat=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by their ids; the last output of each has the finish reason `abort`."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._in_background(partial(self._abort, ids))

    async def stats(self) -> dict[str, Any]:
        """Blocks, cache hits and counters, as a plain dict."""
        client = (await self._started()).client
        stats: dict[str, Any] = await self._in_background(partial(client.call, "stats"))
        return stats

    async def get_tokenizer(self) -> Tokenizer | None:
        return (await self._started()).client.tokenizer

    # --- in the caller's loop -------------------------------------------------------------------

    async def _started(self) -> Started:
        try:
            # The caller may be cancelled; the start of the engine is not.
            return await asyncio.shield(asyncio.wrap_future(self._starting))
        except asyncio.CancelledError:
            if self._starting.cancelled():
                raise QuireError(CLOSED) from None
            raise

    async def _in_background(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await asyncio.wrap_future(self._background.start(make))
        except EngineDied:
            raise EngineFailed(DIED) from None

    async def _outputs(
        self,
        read: Read,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        is_chat: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        started = await self._started()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError("The parameters of a request are a SamplingParams.")
        client, prompt = started.client, await read(started.reader)
        chat = ThinkingChat.of(client.tokenizer, prompt.token_ids) if is_chat else None
        if is_chat:
            params = chat_params(params, chat)
        client.limits.check(prompt.token_ids, params, options)
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        output = GrowingOutput(name, prompt, params, client.tokenizer, chat)
        request = OpenRequest(name, prompt, params, options, output, Mailbox())
        following = self._background.start(partial(self._follow, client, request))
        try:
            while True:
                latest = await request.mailbox.take()
                yield latest
                if latest.finished:
                    return
        finally:
            following.cancel()

    # --- in the background ----------------------------------------------------------------------

    async def _follow(self, client: EngineClient, request: OpenRequest) -> None:
        """Start a request and pass on its outputs until it ends, or its caller cancels this."""
        try:
            if self._open.setdefault(request.id, request) is not request:
                raise RequestError(f"The request id {request.id!r} is in use; choose another.")
            try:
                await _pass_on(client, request)
            finally:
                del self._open[request.id]
        except EngineDied:
            request.mailbox.put(EngineFailed(DIED))
        except QuireError as error:
            request.mailbox.put(error)

    async def _abort(self, ids: list[str]) -> None:
        for request_id in ids:
            if (request := self._open.get(request_id)) is not None:
                request.is_aborted = True
                request.changed.set()


@dataclass(frozen=True)
class Started:
    """The engine's process, once its model is loaded."""

    client: EngineClient
    reader: PromptReader


@dataclass(eq=False)
class OpenRequest:
    id: str
    prompt: ReadPrompt
    params: SamplingParams
    options: RequestOptions
    output: GrowingOutput
    mailbox: Mailbox
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_aborted: bool = False


async def _start(config: EngineConfig, progress: bool) -> Started:
    client = await EngineClient.start(config, progress, log_level="WARNING")
    return Started(client, PromptReader(client.tokenizer, client.limits))


def _finish(background: LoopThread, starting: Future[Started]) -> threading.Thread:
    """End the engine, and then the thread, which is returned."""

    async def end() -> None:
        if starting.cancel() or starting.exception() is not None:
            return  # there is no engine
        client = starting.result().client
        client.abandon(CLOSED)
        await client.stop()

    return background.finish(end)


async def _pass_on(client: EngineClient, request: OpenRequest) -> None:
    handle = client.submit(
        request.prompt.token_ids, request.params, request.options, changed=request.changed
    )
    try:
        is_over = False
        while not is_over:
            await request.changed.wait()
            request.changed.clear()
            if request.is_aborted:
                latest = request.output.abort(handle.admission)
            elif (update := handle.take()) is not None:
                latest = request.output.grow(update, handle.admission)
            else:
                continue
            is_read = request.mailbox.put(latest)
            is_over = latest.finished or not is_read
    finally:
        client.close(handle)
