"""One engine, wherever it runs, as its callers see it: what they ask of it, and what is open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

from quire.engine.process.messages import PackedRequest
from quire.engine.process.request_handle import RequestFailed, RequestHandle

MOST_ADAPTERS = 32  # that an engine is thought to have: as many as it keeps by default


class EngineLink(ABC):
    """Keeps the handles of the open requests; a subclass takes their requests to the engine."""

    def __init__(self, name: str = "") -> None:
        self.name = name  # among several engines
        self.num_waiting_tokens = 0  # prompt tokens of the requests that wait to be admitted
        self.adapters: OrderedDict[str, None] = OrderedDict()  # by fingerprint, the last one last
        self._open: dict[int, RequestHandle] = {}
        self._waiting: dict[int, RequestHandle] = {}

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    async def call(self, name: str, **args: Any) -> Any:
        """The answer to one of the worker's named calls, given between two steps."""

    @abstractmethod
    def _send_request(self, handle: RequestHandle, request: PackedRequest) -> None: ...

    @abstractmethod
    def _abort(self, handle: RequestHandle) -> None:
        """Have the engine end a request that is open."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not admitted yet."""
        return len(self._waiting)

    def place(self, handle: RequestHandle, request: PackedRequest) -> None:
        """Start the request of a handle."""
        handle.engine = self.name
        self._open[handle.number] = handle
        if not request["options"].get("background"):  # it waits behind all that counts here
            self._waiting[handle.number] = handle
            self.num_waiting_tokens += handle.num_prompt_tokens
        self._send_request(handle, request)

    def note_adapter(self, fingerprint: str) -> None:
        """A request with this adapter is sent there: the engine has it soon, and for a while."""
        self.adapters[fingerprint] = None
        self.adapters.move_to_end(fingerprint)
        if len(self.adapters) > MOST_ADAPTERS:
            self.adapters.popitem(last=False)

    def close(self, handle: RequestHandle) -> None:
        """The caller waits for the request no longer: end it, if it has not ended."""
        if handle.number in self._open and not handle.finished:
            self._abort(handle)
        self._forget(handle)

    def abandon(self, why: str) -> None:
        """End all open requests with an error."""
        for handle in self._open.values():
            if not handle.finished:
                handle.fail(RequestFailed(why, "shutdown"))
                self._abort(handle)

    def _updated(self, handle: RequestHandle) -> None:
        """The handle has an update: a request that was admitted, or has failed, waits no longer."""
        if handle.finished or handle.admission is not None:
            self._leave_queue(handle)

    def _leave_queue(self, handle: RequestHandle) -> None:
        if self._waiting.pop(handle.number, None) is not None:
            self.num_waiting_tokens -= handle.num_prompt_tokens

    def _forget(self, handle: RequestHandle) -> bool:
        """Whether the request was open."""
        self._leave_queue(handle)
        return self._open.pop(handle.number, None) is not None

    def _forget_all(self) -> list[RequestHandle]:
        """The handles whose requests have not ended."""
        unfinished = [handle for handle in self._open.values() if not handle.finished]
        self._open, self._waiting, self.num_waiting_tokens = {}, {}, 0
        return unfinished
