"""A handle that relays its updates to the process that has the caller's handle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from quire.engine.process.messages import RequestUpdate
from quire.engine.process.request_handle import Admission, RequestHandle
from quire.errors import QuireError

RelayedUpdates = tuple[float, list[Any]]  # when it was told here, and what, in order


class Relay(RequestHandle):
    def __init__(self, number: int, num_prompt_tokens: int) -> None:
        super().__init__(number, num_prompt_tokens, asyncio.Event())
        self._items: list[Any] = []
        self._failure: QuireError | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, and all of it was relayed."""
        return self.finished and not self._items and self._failure is None

    async def relayed(self) -> RelayedUpdates:
        """All that has come since the last call, once there is something; EngineDied."""
        await self.changed.wait()
        self.changed.clear()
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        return time.monotonic(), items

    # --- the client's side ---------------------------------------------------------------------

    def draw(self, sample: int, token_id: int) -> None:
        self._items.append((sample, token_id))
        self.changed.set()

    def add(self, update: RequestUpdate) -> None:
        self._items.append(update)
        if "admitted" in update:
            self.admission = Admission(**update["admitted"])
        if "error" in update or update.get("finished"):
            self._finish()
        self.changed.set()

    def fail(self, error: QuireError) -> None:
        self._failure = error
        super().fail(error)


def deliver(handle: RequestHandle, relayed: RelayedUpdates) -> None:
    """Tell the real handle what its relay was told, on a machine with another clock perhaps."""
    told_at, items = relayed
    ahead = time.monotonic() - told_at
    for item in items:
        if isinstance(item, tuple):
            handle.draw(*item)
            continue
        if "ended" in item:
            ended = item["ended"]
            ended["stages"] = [(name, at + ahead) for name, at in ended["stages"]]
        handle.add(item)
