"""Several engines that look like one: started together, each started again when it dies."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.progress import say_step
from quire.replicas.dispatcher import Dispatcher
from quire.replicas.handover import roles
from quire.replicas.machine import find_gpus, replica_config, replica_environment, start_order
from quire.replicas.replica import Replica
from quire.replicas.routers import make_router
from quire.replicas.routing import Router

log = logging.getLogger("quire.server")

MOST_FAILURES = 5  # in a row, of every replica, before all is given up
POLL_S = 0.05
LOOK_S = 10.0
HUNG_S = 300.0  # without a step that ends


class Fleet(Dispatcher[Replica]):
    """Made by `start`."""

    def __init__(self, replicas: list[Replica], router: Router) -> None:
        super().__init__(replicas, router)
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
        num_prefill: int = 0,
        journal: bool = False,
    ) -> Fleet:
        """Start all replicas and wait until they are up; QuireError if one cannot be started.

        With `progress` the first tells how its start gets on, and the others when they are up.
        """
        each_role = roles(count, num_prefill, config.remote_cache_url)
        gpus = await asyncio.to_thread(find_gpus, config.device)
        replicas = [
            Replica(
                str(number),
                replica_config(config, number, count, len(gpus)),
                replica_environment(number, count, gpus),
                journal,
                each_role[number],
            )
            for number in range(count)
        ]
        fleet = cls(replicas, make_router(routing, config.block_size))
        starting: list[asyncio.Task[None]] = []
        try:
            for group in start_order(count, len(gpus)):
                begun = (fleet._begin(replicas[at], progress) for at in group)
                starting = [asyncio.create_task(each) for each in begun]
                await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            for replica in replicas:
                replica.kill()
            raise
        fleet._keepers = [asyncio.create_task(fleet._keep(replica)) for replica in replicas]
        return fleet

    async def _begin(self, replica: Replica, progress: bool = False) -> None:
        """Start it, and let it have what has waited for one."""
        self._router.join(replica.name)
        on_blocks = partial(self._router.apply, replica.name)
        is_first = replica is self.replicas[0]
        client = await replica.start(self._numbers, on_blocks, progress and is_first)
        client.on_lost = self._take_back
        # They are the same of all.
        self.limits, self.tokenizer = client.limits, client.tokenizer
        self.pooling, self.namespace = client.pooling, client.namespace
        assert self.pooling is not None or self.namespace is not None, "it tells of its blocks"
        replica.state = "up"
        if progress:
            say_step(f"replica {replica.name} is up ({len(self.replicas)} in all)")
        self.take_waiting()

    async def _keep(self, replica: Replica) -> None:
        """See to it that it is there, as long as the fleet is."""
        while True:
            watching = asyncio.create_task(self._watch(replica))
            try:
                await replica.until_down()
            finally:
                watching.cancel()
            self._router.leave(replica.name)
            log.warning("Replica %s has ended; it is started again.", replica.name)
            while not replica.is_up:
                failing = [not r.is_up and r.num_failures >= MOST_FAILURES for r in self.replicas]
                if all(failing):
                    self.give_up()
                    return
                await replica.pause()
                try:
                    await self._begin(replica)
                except (QuireError, OSError) as error:
                    replica.num_failures += 1
                    log.warning("Replica %s does not start: %s", replica.name, error)

    async def _watch(self, replica: Replica) -> None:
        """End it, if it does not answer for long: it hangs, and others can do its work."""
        client = replica.client
        assert client is not None
        while client.is_alive:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.wait_for(client.call("ping"), HUNG_S)
            except asyncio.TimeoutError:
                log.warning("Replica %s has not answered in %d s.", replica.name, HUNG_S)
                client.kill()
            except QuireError:
                return  # it has died by itself

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
