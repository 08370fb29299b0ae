"""One of several engines: its process, whether it is to be given work, and how much it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config import EngineConfig
from quire.engine.process.client import EngineClient
from quire.kv.events import BlockEvents
from quire.replicas.handover import BOTH

STEADY_S = 60.0  # one that lived so long is started again at once
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
FAREWELL_S = 60.0
POLL_S = 0.05


@dataclass
class Replica:
    """`state` is "starting", "up", "draining" or "down"."""

    name: str
    config: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)
    journal: bool = False
    role: str = BOTH
    client: EngineClient | None = None
    state: str = "down"
    load: float = 0.0  # tokens that its open requests have it compute
    num_starts: int = 0
    num_failures: int = 0  # in a row, each soon after it was started, or in starting
    _up_since: float = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it may be given work."""
        return self.state == "up" and self.client is not None and self.client.is_alive

    def as_dict(self) -> dict[str, Any]:
        client = self.client if self.state in ("up", "draining") else None
        return {
            "name": self.name,
            "state": self.state,
            "role": self.role,
            "load": self.load,
            "open": client.num_open if client else 0,
            "waiting": client.num_waiting if client else 0,
            "starts": self.num_starts,
        }

    async def start(
        self,
        numbers: Iterator[int],
        on_blocks: Callable[[BlockEvents], None],
        progress: bool = False,
    ) -> EngineClient:
        """QuireError if it cannot."""
        self.state = "starting"
        self.num_starts += 1
        try:
            self.client = await EngineClient.start(
                self.config,
                progress,
                journal=self.journal,
                name=self.name,
                numbers=numbers,
                on_blocks=on_blocks,
                env=self.environment,
            )
        except BaseException:
            self.state = "down"
            raise
        # What was left for its pool when all was new may not be there when it comes again.
        self.config = replace(self.config, num_blocks=self.client.num_blocks or None)
        self._up_since = asyncio.get_running_loop().time()
        return self.client

    async def until_down(self) -> None:
        """Wait until its process has ended, and see how long it lasted."""
        assert self.client is not None
        await self.client.died.wait()
        self.state = "down"
        await self.client.stop()
        lasted = asyncio.get_running_loop().time() - self._up_since
        self.num_failures = 0 if lasted > STEADY_S else self.num_failures + 1

    async def pause(self) -> None:
        """The longer, the more often it has failed."""
        if self.num_failures:
            wait = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (self.num_failures - 1))
            await asyncio.sleep(wait)

    async def drain(self, patience: float) -> None:
        """Take nothing more, and wait until what is open has ended, within `patience`."""
        self.state = "draining"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while self.client is not None and self.client.num_open and loop.time() < deadline:
            await asyncio.sleep(POLL_S)

    async def stop(self) -> int | None:
        """Let it write what is on its way to lower tiers, and end; its exit status.

        0 if it was not there: that it died was told when it did.
        """
        if self.client is None or not self.client.is_alive:
            return 0
        self.state = "draining"
        return await self.client.stop(FAREWELL_S)

    def kill(self) -> None:
        if self.client is not None:
            self.client.kill()
