"""Several engines that look like one: requests go where their prefix is, and outlive a replica.

    submit ─► router ─► replica's engine ─► news land in the request's ticket, whoever computes it
                 ▲          │
                 ╰─ blocks ─╯

A replica that dies is started again. Requests that nobody has read anything of yet go to another
one; a stream whose beginning was sent ends with an error. While no replica is up, requests wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.beam_params import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.limits import Limits
from quire.engine.process.client import DIED, EngineClient
from quire.engine.process.messages import Order, make_order
from quire.engine.process.ticket import EngineDied, RequestFailed, Ticket
from quire.errors import QuireError
from quire.kv.keys import Namespace
from quire.models.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.replicas.machine import find_gpus, replica_config, replica_environment
from quire.replicas.prompt_keys import prompt_keys
from quire.replicas.replica import Replica
from quire.replicas.routers import make_router
from quire.replicas.routing import Router, Sent

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

log = logging.getLogger("quire.server")

MOST_TRIES = 2  # of one request: what kills its engine does not go on to kill them all
MOST_FAILURES = 5  # in a row, of every replica, before all is given up
POLL_S = 0.05
ANSWER_LOAD = 64  # tokens: what a request weighs besides the part of its prompt to compute
LOST = "The replica that was computing this answer has ended; ask again."
LONG_WAIT = "No replica could take the request in {:.0f} s; try again later."


@dataclass(eq=False)
class _Open:
    """A request that somebody waits for."""

    ticket: Ticket
    order: Order
    keys: list[bytes]
    replica: Replica | None = None
    sent: Sent | None = None
    load: float = 0.0
    num_tries: int = 0
    deadline: asyncio.TimerHandle | None = None  # while no replica has it


class Fleet:
    """Made by `start`; everything is called from one event loop."""

    def __init__(self, replicas: list[Replica], router: Router) -> None:
        self.replicas = replicas
        self.died = asyncio.Event()
        self.limits: Limits
        self.tokenizer: Tokenizer | None
        self.namespace: Namespace
        self._router = router
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._homeless: dict[int, _Open] = {}  # those that wait for a replica to be up
        self._keepers: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    # --- beginning and end --------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        count: int,
        routing: str = "prefix",
        progress: bool = False,
        *,
        journal: bool = False,
    ) -> Fleet:
        """Start all replicas and wait until they are up; QuireError if one cannot be started.

        The first is started alone: what it fetches, the others find.
        """
        gpus = await asyncio.to_thread(find_gpus, config.device)
        replicas = [
            Replica(
                str(number),
                replica_config(config, number, count, len(gpus)),
                replica_environment(number, count, gpus),
                journal,
            )
            for number in range(count)
        ]
        fleet = cls(replicas, make_router(routing, config.block_size))
        try:
            await fleet._begin(replicas[0], progress)
            await asyncio.gather(*(fleet._begin(replica) for replica in replicas[1:]))
        except BaseException:
            for replica in replicas:
                replica.kill()
            raise
        fleet._keepers = [asyncio.create_task(fleet._keep(replica)) for replica in replicas]
        return fleet

    async def _begin(self, replica: Replica, progress: bool = False) -> None:
        """Start it, and let it have what has waited for one."""
        self._router.join(replica.name)
        on_blocks = partial(self._router.apply, replica.name)
        client = await replica.start(self._numbers, on_blocks, progress)
        client.on_lost = self._take_back
        # They are the same of all.
        self.limits, self.tokenizer = client.limits, client.tokenizer
        self.namespace = client.namespace
        replica.state = "up"
        waiting, self._homeless = self._homeless, {}
        for each in waiting.values():
            self._place(each)

    async def _keep(self, replica: Replica) -> None:
        """See to it that it is there, as long as the fleet is."""
        while True:
            await replica.until_down()
            self._router.leave(replica.name)
            log.warning("Replica %s has ended; it is started again.", replica.name)
            while not replica.is_up:
                failing = [not r.is_up and r.num_failures >= MOST_FAILURES for r in self.replicas]
                if all(failing):
                    self._give_up()
                    return
                await replica.pause()
                try:
                    await self._begin(replica)
                except QuireError as error:
                    replica.num_failures += 1
                    log.warning("Replica %s does not start: %s", replica.name, error)

    def _give_up(self) -> None:
        self.died.set()
        for each in list(self._open.values()):
            if not each.ticket.finished:
                each.ticket.fail(EngineDied(DIED))

    def restart(self, patience: float) -> None:
        """Start all replicas anew, one after the other; open requests get `patience` to end."""
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart_in_turn(patience))

    async def _restart_in_turn(self, patience: float) -> None:
        for replica in self.replicas:
            if replica.is_up and replica.client is not None:
                await replica.drain(patience)
                await replica.client.stop()
            while not replica.is_up:  # its keeper sees to that
                await asyncio.sleep(POLL_S)

    async def stop(self) -> int | None:
        tasks = [*self._keepers, *filter(None, [self._restarting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statuses = await asyncio.gather(*(replica.stop() for replica in self.replicas))
        return next((status for status in statuses if status != 0), 0)

    # --- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams | BeamSearchParams,
        *,
        changed: asyncio.Event | None = None,
        **options: Any,
    ) -> Ticket:
        """As one engine's; where no replica is up, it waits for one, for as long as in a queue."""
        if self.died.is_set():
            raise EngineDied(DIED)
        order = make_order(prompt_ids, params, **options)
        keys = prompt_keys(self.namespace, prompt_ids, order["cache_salt"])
        ticket = Ticket(next(self._numbers), len(prompt_ids), changed or asyncio.Event())
        self._open[ticket.number] = _Open(ticket, order, keys)
        self._place(self._open[ticket.number])
        return ticket

    def _place(self, each: _Open) -> None:
        by_name = {replica.name: replica for replica in self.replicas if replica.is_up}
        if not by_name:
            self._hold(each)
            return
        if each.deadline is not None:
            each.deadline.cancel()
        loads = {name: replica.load for name, replica in by_name.items()}
        name, num_blocks = self._router.choose(each.keys, loads)
        replica = each.replica = by_name[name]
        assert replica.client is not None
        cached = num_blocks * self.namespace.block_size
        each.load = each.ticket.num_prompt_tokens - cached + ANSWER_LOAD
        each.num_tries += 1
        each.sent = self._router.begin(name, each.keys)
        replica.load += each.load
        replica.client.place(each.ticket, each.order)

    def _hold(self, each: _Open) -> None:
        """It waits for a replica, but not for ever."""
        self._homeless[each.ticket.number] = each
        patience = each.order["queue_s"]
        if patience is not None and each.deadline is None:
            loop = asyncio.get_running_loop()
            each.deadline = loop.call_later(patience, self._turn_away, each, patience)

    def _turn_away(self, each: _Open, waited: float) -> None:
        if self._homeless.pop(each.ticket.number, None) is not None:
            each.ticket.fail(RequestFailed(LONG_WAIT.format(waited), "queue"))

    def _take_back(self, ticket: Ticket) -> None:
        """Its replica is gone: another begins anew, if nobody has seen how it began."""
        each = self._open.get(ticket.number)
        if each is None:
            return
        self._release(each)
        if ticket.was_read or each.num_tries >= MOST_TRIES:
            ticket.fail(EngineDied(LOST))
            return
        ticket.begin_again()
        self._place(each)

    def _release(self, each: _Open) -> None:
        if each.replica is not None and each.sent is not None:
            self._router.end(each.sent)
            each.replica.load -= each.load
            each.replica = each.sent = None

    def close(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: end it, if it has not ended."""
        each = self._open.pop(ticket.number, None)
        if each is None:
            return
        self._homeless.pop(ticket.number, None)
        if each.deadline is not None:
            each.deadline.cancel()
        replica = each.replica
        self._release(each)
        if replica is not None and replica.client is not None:
            replica.client.close(ticket)

    def abandon(self, why: str) -> None:
        """End all open requests with an error."""
        for replica in self.replicas:
            if replica.client is not None:
                replica.client.abandon(why)
        for each in self._homeless.values():
            each.ticket.fail(RequestFailed(why, "shutdown"))
        self._homeless.clear()

    # --- how things are -----------------------------------------------------------------------

    @property
    def engines(self) -> dict[str, EngineClient]:
        alive = {each.name: each.client for each in self.replicas}
        return {name: client for name, client in alive.items() if client and client.is_alive}

    def members(self) -> list[dict[str, Any]]:
        return [replica.as_dict() for replica in self.replicas]

    @property
    def is_alive(self) -> bool:
        return not self.died.is_set()

    @property
    def is_ready(self) -> bool:
        return any(replica.is_up for replica in self.replicas)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._homeless) + sum(each.num_waiting for each in self.engines.values())

    @property
    def num_waiting_tokens(self) -> int:
        homeless = sum(each.ticket.num_prompt_tokens for each in self._homeless.values())
        return homeless + sum(each.num_waiting_tokens for each in self.engines.values())
