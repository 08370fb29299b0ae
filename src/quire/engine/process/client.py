"""The engine's process as asyncio code sees it: submit, follow, abort, call, stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.beam_params import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.limits import Limits
from quire.engine.process.messages import Frames, Message, pack, pack_ids, pack_params
from quire.engine.process.ticket import EngineDied, RequestFailed, Ticket
from quire.errors import QuireError
from quire.models.tokenizer import Tokenizer
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

CHUNK = 1 << 18
EXIT_S = 30.0  # for a process that has let go of everything to be gone
DIED = "The engine's process has ended; see its log, and start the server again."


class EngineClient:
    """Made by `start`; everything is called from one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._socket = sock
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._waiting: dict[int, Ticket] = {}
        self.num_waiting_tokens = 0  # prompt tokens of those
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.died = asyncio.Event()  # set however it ended
        self.limits: Limits
        self.eos_token_ids: list[int]
        self.tokenizer: Tokenizer | None

    # --- beginning and end --------------------------------------------------------------------

    @classmethod
    async def start(
        cls, config: EngineConfig, progress: bool = False, log_level: str = "INFO"
    ) -> EngineClient:
        """Start the process and wait until its model is loaded; QuireError if that fails."""
        near, far = socket.socketpair()
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.process.worker", str(far.fileno())],
                pass_fds=[far.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
            )
        client = cls(process, near)
        try:
            await client._connect({**asdict(config), "progress": progress, "log_level": log_level})
        except BaseException:
            client.kill()
            raise
        return client

    async def _connect(self, settings: Message) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._listener = asyncio.create_task(self._listen())
        self._send(settings)
        ready = await self._ready
        self.limits = Limits(**ready["limits"])
        self.eos_token_ids = ready["eos_token_ids"]
        plain = ready["tokenizer"]
        self.tokenizer = None if plain is None else Tokenizer.from_plain(plain)

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
    def pid(self) -> int:
        return self._process.pid

    # --- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams | BeamSearchParams,
        *,
        stream: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str | None = None,
        queue_s: float | None = None,
        changed: asyncio.Event | None = None,
    ) -> Ticket:
        """Start a request whose prompt and parameters are checked.

        It ends with an error if it is not admitted within `queue_s`. `changed` is the event to set
        when it has news, for those who wait for several.
        """
        if self.died.is_set():
            raise EngineDied(DIED)
        ticket = Ticket(next(self._numbers), len(prompt_ids), changed or asyncio.Event())
        self._tickets[ticket.number] = ticket
        self._waiting[ticket.number] = ticket
        self.num_waiting_tokens += len(prompt_ids)
        self._send(
            {
                "do": "add",
                "number": ticket.number,
                "prompt": pack_ids(prompt_ids),
                "params": pack_params(params),
                "stream": stream,
                "priority": priority,
                "cache_salt": cache_salt,
                "tenant": tenant,
                "queue_s": queue_s,
            }
        )
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: end it, if it has not ended."""
        self._leave_queue(ticket)
        if self._tickets.pop(ticket.number, None) is not None and not ticket.finished:
            self._send({"do": "abort", "number": ticket.number})

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not admitted yet."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    def _leave_queue(self, ticket: Ticket) -> None:
        if self._waiting.pop(ticket.number, None) is not None:
            self.num_waiting_tokens -= ticket.num_prompt_tokens

    def abandon(self, why: str) -> None:
        """End all open requests with an error."""
        for ticket in self._tickets.values():
            if not ticket.finished:
                ticket.fail(RequestFailed(why, "shutdown"))
                self._send({"do": "abort", "number": ticket.number})

    async def call(self, name: str, **args: Any) -> Any:
        """The answer to one of the worker's named calls, given between two steps."""
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
        frames = Frames()
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
        tickets, drawn = self._tickets, message.get("drawn", ())
        for i in range(0, len(drawn), 3):
            if (ticket := tickets.get(drawn[i])) is not None:
                ticket.draw(drawn[i + 1], drawn[i + 2])
        for news in message.get("news", ()):
            if (ticket := tickets.get(news["number"])) is not None:
                ticket.add(news)
                if ticket.finished or ticket.admission is not None:
                    self._leave_queue(ticket)
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
        if not self._ready.done():
            self._ready.set_exception(error)
        for ticket in self._tickets.values():
            if not ticket.finished:
                ticket.fail(error)
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(error)


def _environment() -> dict[str, str]:
    """What this process has, its path, OpenMP threads that leave room for this process, and an end
    to oneDNN's memory of products: each number of rows is one, and prompts have any number."""
    path = os.pathsep.join(filter(None, sys.path))
    calm = {"GOMP_SPINCOUNT": "1000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
    return {**calm, **os.environ, "PYTHONPATH": path}
