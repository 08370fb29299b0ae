"""The engine's process as asyncio code sees it: submit, follow, abort, call, stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.limits import Limits
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.messages import (
    Message,
    PackedRequest,
    Params,
    pack_request,
    unpack_events,
)
from quire.engine.process.request_handle import EngineDied, RequestHandle
from quire.errors import QuireError
from quire.framing import FrameReader, pack
from quire.kv.events import BlockEvents
from quire.kv.keys import Namespace
from quire.models.pooling.facts import PoolingFacts
from quire.models.text.tokenizer import Tokenizer
from quire.request_options import DEFAULT_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

CHUNK = 1 << 18
EXIT_S = 30.0  # for a process that has let go of everything to be gone
DIED = "The engine's process has ended; see its log, and start the server again."


class EngineClient(EngineLink):
    """Made by `start`; everything is called from one event loop."""

    is_ready = True  # `start` returns when the model is loaded

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        name: str = "0",
        numbers: Iterator[int] | None = None,
        on_blocks: Callable[[BlockEvents], None] | None = None,
    ) -> None:
        super().__init__(name)
        self.on_lost: Callable[[RequestHandle], None] = (
            _fail  # of requests that were open when it died
        )
        self._on_blocks = on_blocks
        self._process = process
        self._socket = sock
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._numbers = numbers or itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.died = asyncio.Event()  # set however the process ended
        self.description: Message  # the worker's `describe`, from which the rest is read
        self.limits: Limits
        self.eos_token_ids: list[int]
        self.tokenizer: Tokenizer | None
        self.namespace: Namespace | None  # of its blocks, if it tells of them
        self.num_blocks: int  # of its pool
        self.pooling: PoolingFacts | None  # of a model that gives embeddings or classes

    # --- beginning and end --------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        progress: bool = False,
        log_level: str = "INFO",
        *,
        journal: bool = False,
        name: str = "0",
        numbers: Iterator[int] | None = None,
        on_blocks: Callable[[BlockEvents], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> EngineClient:
        """Start the process and wait until its model is loaded; QuireError if that fails.

        With `journal` the engine records what happens to requests; with `on_blocks` it sends which
        blocks its tiers hold. `numbers` are the numbers of its requests.
        """
        near, far = socket.socketpair()
        with far, _signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.process", str(far.fileno())],
                pass_fds=[far.fileno()],
                env=_environment() | dict(env or {}),
                stdin=subprocess.DEVNULL,
            )
        client = cls(process, near, name, numbers, on_blocks)
        how = {"progress": progress, "log_level": log_level}
        how |= {"journal": journal, "publish_events": on_blocks is not None}
        try:
            await client._connect({**asdict(config), **how})
        except BaseException:
            client.kill()
            raise
        return client

    async def _connect(self, settings: Message) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._listener = asyncio.create_task(self._listen())
        self._send(settings)
        ready = self.description = await self._ready
        self.limits = Limits(**ready["limits"])
        self.eos_token_ids = ready["eos_token_ids"]
        plain = ready["tokenizer"]
        self.tokenizer = None if plain is None else Tokenizer.from_plain(plain)
        told = ready["namespace"]
        self.namespace = None if told is None else Namespace(**told)
        self.num_blocks = ready["num_blocks"]
        facts = ready["pooling"]
        self.pooling = None if facts is None else PoolingFacts.from_plain(facts)

    async def stop(self, timeout: float = 60.0) -> int | None:
        """Ask it to write what is on its way to lower tiers and to end; its exit status."""
        if not self.died.is_set():
            self._send({"do": "stop"})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.died.wait(), timeout)
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_S)
        self.kill()
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return not self.died.is_set()

    @property
    def engines(self) -> dict[str, EngineClient]:
        """By name, the engines that answer calls: itself."""
        return {self.name: self}

    def members(self) -> list[dict[str, Any]]:
        return []

    @property
    def pid(self) -> int:
        return self._process.pid

    # --- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: TokenIds,
        params: Params,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        changed: asyncio.Event | None = None,
    ) -> RequestHandle:
        """Start a request whose prompt and parameters are checked.

        `changed` is the event to set when it has an update, for callers that wait for several
        requests.
        """
        if self.died.is_set():
            raise EngineDied(DIED)
        handle = RequestHandle(next(self._numbers), len(prompt_ids), changed or asyncio.Event())
        self.place(handle, pack_request(prompt_ids, params, options))
        return handle

    def _send_request(self, handle: RequestHandle, request: PackedRequest) -> None:
        self._send({"do": "add", "number": handle.number, **request})

    def _abort(self, handle: RequestHandle) -> None:
        self._send({"do": "abort", "number": handle.number})

    async def call(self, name: str, **args: Any) -> Any:
        if self.died.is_set():
            raise EngineDied(DIED)
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send({"do": "call", "number": number, "name": name, "args": args})
        try:
            return await answer
        finally:
            del self._calls[number]

    # --- the socket ---------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if not self.died.is_set():
            self._writer.write(pack(message))

    async def _listen(self) -> None:
        frames = FrameReader()
        try:
            while data := await self._reader.read(CHUNK):
                for message in frames.feed(data):
                    self._take(message)
        except OSError:
            pass
        finally:
            self._end()

    def _take(self, message: Message) -> None:
        if "ready" in message:
            self._ready.set_result(message["ready"])
        elif "failed" in message:
            self._ready.set_exception(QuireError(message["failed"]))
        if "blocks" in message and self._on_blocks is not None:
            self._on_blocks(unpack_events(message["blocks"]))
        handles, drawn = self._open, message.get("drawn", ())
        for i in range(0, len(drawn), 3):
            if (handle := handles.get(drawn[i])) is not None:
                handle.draw(drawn[i + 1], drawn[i + 2])
        for update in message.get("updates", ()):
            if (handle := handles.get(update["number"])) is not None:
                handle.add(update)
                self._updated(handle)
        for answer in message.get("answers", ()):
            if (waiting := self._calls.get(answer["number"])) is not None and not waiting.done():
                if "error" in answer:
                    waiting.set_exception(QuireError(answer["error"]))
                else:
                    waiting.set_result(answer["value"])

    def _end(self) -> None:
        self.died.set()
        self._writer.close()
        error = EngineDied(DIED)
        for handle in self._forget_all():
            self.on_lost(handle)
        for waiting in (self._ready, *self._calls.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # asyncio would log it where no caller awaits it any more


def _fail(handle: RequestHandle) -> None:
    handle.fail(EngineDied(DIED))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that begins here gets no Ctrl-C of a terminal before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """This process's environment and path, OpenMP threads that stop spinning soon, to leave this
    process its core, and a bound on oneDNN's cache, which has an entry for each number of rows."""
    path = os.pathsep.join(filter(None, sys.path))
    calm = {"GOMP_SPINCOUNT": "1000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
    return {**calm, **os.environ, "PYTHONPATH": path}
