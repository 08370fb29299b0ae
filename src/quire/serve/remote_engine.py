"""An engine that is an actor of Ray's, as the server's process sees it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.engine.process.client import DIED
from quire.engine.process.messages import Message, Order
from quire.engine.process.request_handle import EngineDied, RequestFailed, RequestHandle
from quire.errors import QuireError
from quire.replicas.handover import BOTH
from quire.replicas.routing import Sent
from quire.serve.relay import deliver

log = logging.getLogger("ray.serve")

T = TypeVar("T")


class RemoteEngine:
    """`state` is "new", "up", "draining" (it only ends what it has) or "down"."""

    def __init__(
        self, target: str, handle: Any, on_lost: Callable[[RemoteEngine, RequestHandle, bool], None]
    ) -> None:
        """`on_lost` is told of each request that it will not end, and whether it had arrived."""
        self.target = target  # Ray's name for it
        self.name = ""  # ours, once it is up
        self.state = "new"
        self.role = BOTH
        self.load = 0.0
        self.ended: list[Sent] = []  # requests whose blocks it has not told of yet
        self.keeper: asyncio.Task[None] | None = None
        self.num_waiting_tokens = 0
        self._handle = handle
        self._on_lost = on_lost
        self._open: dict[int, RequestHandle] = {}
        self._waiting: dict[int, RequestHandle] = {}
        self._unsettled: set[int] = set()  # of which it is not known whether they arrived there
        self._followers: dict[int, asyncio.Task[None]] = {}

    @property
    def client(self) -> RemoteEngine:
        return self

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def is_alive(self) -> bool:
        return self.state != "down"

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "role": self.role,
            "load": self.load,
            "open": self.num_open,
            "waiting": self.num_waiting,
            "starts": 1,
        }

    # --- requests -----------------------------------------------------------------------------

    def place(self, ticket: RequestHandle, order: Order) -> None:
        number = ticket.number
        ticket.engine = self.name
        self._open[number] = self._waiting[number] = ticket
        self._unsettled.add(number)
        self.num_waiting_tokens += ticket.num_prompt_tokens
        self._followers[number] = _apart(self._follow(ticket, order))

    async def _follow(self, ticket: RequestHandle, order: Order) -> None:
        response = self._handle.options(stream=True).follow.remote(self.target, order)
        try:
            async for passed in response:
                self._unsettled.discard(ticket.number)
                deliver(ticket, passed)
                if ticket.finished or ticket.admission is not None:
                    self._leave_queue(ticket)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:  # Ray's, or the engine's: whatever it is, no more will come
            log.warning("Replica %s lost a request: %s", self.name, _first_line(error))
        self._lose(ticket)

    def close(self, ticket: RequestHandle) -> None:
        follower = self._followers.get(ticket.number)
        if self._forget(ticket) and follower is not None and not ticket.finished:
            follower.cancel()

    def abandon(self, why: str) -> None:
        for ticket in list(self._open.values()):
            if not ticket.finished:
                ticket.fail(RequestFailed(why, "shutdown"))
                self._followers[ticket.number].cancel()

    def drain(self) -> None:
        """It gets nothing new. What may not have reached it goes elsewhere."""
        self.state = "draining"
        for number in list(self._unsettled):
            self._followers[number].cancel()
            self._lose(self._open[number])

    def _lose(self, ticket: RequestHandle) -> None:
        arrived = ticket.number not in self._unsettled
        if not ticket.finished and self._forget(ticket):
            self._on_lost(self, ticket, arrived)

    def _leave_queue(self, ticket: RequestHandle) -> None:
        if self._waiting.pop(ticket.number, None) is not None:
            self.num_waiting_tokens -= ticket.num_prompt_tokens

    def _forget(self, ticket: RequestHandle) -> bool:
        self._leave_queue(ticket)
        self._unsettled.discard(ticket.number)
        self._followers.pop(ticket.number, None)
        return self._open.pop(ticket.number, None) is not None

    # --- questions ----------------------------------------------------------------------------

    async def call(self, name: str, **args: Any) -> Any:
        return await _apart(self._ask("ask", name, args))

    async def describe(self) -> Message:
        told: Message = await _apart(self._ask("describe"))
        return told

    async def blocks(self, since: int) -> tuple[int, Message]:
        position, events = await _apart(self._ask("blocks", since))
        return position, events

    async def _ask(self, method: str, *args: Any) -> Any:
        response = getattr(self._handle, method).remote(self.target, *args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            cause = getattr(error, "cause", error)
            raise cause if isinstance(cause, QuireError) else EngineDied(DIED) from None


def _apart(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """In no request's context: Ray takes all calls of one request for the same one."""
    return contextvars.Context().run(asyncio.create_task, call)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
