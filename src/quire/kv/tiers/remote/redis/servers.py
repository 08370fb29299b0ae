"""Which server holds which key: the only one, or the node of a cluster that owns the key's slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis.crc import key_slot

from quire.kv.tiers.remote.client import ClientError
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.pool import Pool
from quire.kv.tiers.remote.redis.connect import Dialler, Place
from quire.kv.tiers.remote.redis.link import Link, Refusal, command

LINKS = 4  # to each server: readers, writers and questions do not wait for each other
SLOTS = 16384


Parts = list[tuple[Pool[Link], list[int]]]


class Servers:
    """One server, at the address that the URL names."""

    def __init__(self, dialler: Dialler, on_loss: Callable[[], None]) -> None:
        self._dialler, self._on_loss = dialler, on_loss
        self._pools: dict[Place | None, Pool[Link]] = {}
        self._closed = False

    def connect(self) -> None:
        try:
            self._fill_pools()
        except Exception as error:
            for pool in self._pools.values():
                pool.turn_away(error)
            raise
        finally:
            if self._closed:  # in the meantime
                self.close()

    def split(self, keys: Sequence[str]) -> Parts:
        """The indices of the keys, by the server that holds them."""
        return [(self._pools[None], list(range(len(keys))))]

    def moved(self) -> None:
        """A server said that a key is not its own."""
        raise ClientError("the server is a node of a cluster; begin the URL with redis+cluster://")

    def close(self) -> None:
        self._closed = True
        self._dialler.close()
        for pool in self._pools.values():
            pool.close()

    def _fill_pools(self) -> None:
        places = self._places()
        before, pools = self._pools, {}
        for place in places:
            pools[place] = before.get(place) or Pool(LINKS, self._on_loss)
        self._pools = pools
        for gone in before.keys() - places:
            before[gone].close()
        for place, pool in pools.items():
            pool.fill(partial(self._dialler.dial, place))

    def _places(self) -> set[Place | None]:
        return {None}


class Cluster(Servers):
    """The masters of a cluster; their slots are asked for anew whenever a call failed."""

    def __init__(self, dialler: Dialler, on_loss: Callable[[], None], timeout: float) -> None:
        super().__init__(dialler, on_loss)
        self._timeout = timeout
        self._owners: list[Place | None] = [None] * SLOTS

    def split(self, keys: Sequence[str]) -> Parts:
        by_owner: dict[Place, list[int]] = defaultdict(list)
        owners, pools = self._owners, self._pools
        for i, key in enumerate(keys):
            owner = owners[key_slot(key.encode())]
            if owner not in pools or owner is None:
                raise ClientError("the cluster has no owner for a slot at the moment")
            by_owner[owner].append(i)
        # In one order for all: two callers that each hold a link of one server and want one of the
        # other's would wait for each other.
        return [(pools[owner], by_owner[owner]) for owner in sorted(by_owner)]

    def moved(self) -> None:
        self._on_loss()

    def _places(self) -> set[Place | None]:
        self._owners = self._ask_for_owners()
        return {owner for owner in self._owners if owner is not None}

    def _ask_for_owners(self) -> list[Place | None]:
        """From the first that answers: one that is known, or the one that the URL names."""
        failure: Exception = ClientError("the cluster has no node")
        for place in [*self._pools, None]:
            try:
                link = self._dialler.dial(place)
            except Exception as error:  # whatever redis-py raises: there may be another
                failure = error
                continue
            try:
                deadline = Deadline(self._timeout)
                link.send([command("CLUSTER", "SLOTS")], deadline)
                return _owners(link.reply(deadline), self._dialler.host(place))
            finally:
                link.close()
        raise failure


def _owners(reply: Any, host: str) -> list[Place | None]:
    """A reply has for each range its first slot, its last, the master's [host, port, …], replicas'.

    A node that does not know its own name leaves it out: it is `host`, which was asked.
    """
    if isinstance(reply, Refusal):
        raise reply
    owners: list[Place | None] = [None] * SLOTS
    for first, last, (name, port, *_), *_ in reply:
        place = (name.decode() if name else host, port)
        owners[first : last + 1] = [place] * (last + 1 - first)
    return owners
