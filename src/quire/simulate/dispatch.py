"""Between arrivals and replicas: who gets which, by what the router knows at that moment.

A replica's news of its blocks and its answers reach the router when the step is over that they come
from, not when it was planned. Loads are counted as the server's own dispatcher counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.kv.block_log import BlockLog
from quire.kv.keys import Namespace
from quire.replicas.dispatcher import ANSWER_LOAD
from quire.replicas.prompt_keys import prompt_keys
from quire.replicas.routing import Router, Sent
from quire.simulate.replica import Replica
from quire.simulate.trace import Arrival


class _Open(NamedTuple):
    sent: Sent
    load: int  # in tokens


class Dispatch:
    def __init__(
        self, router: Router, replicas: Sequence[Replica], namespace: Namespace, listens: bool
    ) -> None:
        """`listens`: the router wants to know of blocks."""
        self._router = router
        self._namespace = namespace
        self._listens = listens
        self._replicas = replicas
        self._loads = {str(replica.number): 0.0 for replica in replicas}
        self._open: list[dict[int, _Open]] = [{} for _ in replicas]
        self._logs: list[BlockLog] = []
        if listens:
            self._logs = [replica.engine.publish_events() for replica in replicas]
        for name in self._loads:
            router.join(name)

    def send(self, arrival: Arrival) -> Replica:
        keys: list[bytes] = []
        if self._listens:
            keys = prompt_keys(self._namespace, arrival.token_ids())
        choice = self._router.choose(keys, self._loads)
        replica = self._replicas[int(choice.replica)]
        cached = choice.num_blocks * self._namespace.block_size
        load = arrival.num_in - cached + ANSWER_LOAD
        self._loads[choice.replica] += load
        number = replica.send(arrival)
        sent = self._router.begin(choice.replica, keys)
        self._open[replica.number][number] = _Open(sent, load)
        return replica

    def hear(self, replica: Replica) -> None:
        """What it has to say of the steps that are over."""
        name, is_open = str(replica.number), self._open[replica.number]
        for number in replica.take_ended():
            ended = is_open.pop(number)
            self._loads[name] -= ended.load
            self._router.end(ended.sent)
        if self._logs and (log := self._logs[replica.number]):
            self._router.apply(name, log.take())
