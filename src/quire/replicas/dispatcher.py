"""Which replica gets a request, and which one next if that one dies.

    submit ─► router ─► replica's engine ─► updates of the request's handle, whichever it is
                 ▲          │
                 ╰─ blocks ─╯

When a replica dies, its requests of which no update was taken go to another replica; a stream whose
beginning was sent ends with an error. While no replica is up, requests wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quire.engine.limits import Limits
from quire.engine.process.client import DIED
from quire.engine.process.engine_link import EngineLink
from quire.engine.process.messages import Params, pack_request
from quire.engine.process.request_handle import EngineDied, RequestFailed, RequestHandle
from quire.kv.keys import Namespace
from quire.models.pooling.facts import PoolingFacts
from quire.models.text.tokenizer import Tokenizer
from quire.replicas.handover import (
    BOTH,
    DECODE,
    LEAST_BLOCKS,
    NO_ANSWER,
    PATIENCE_S,
    PREFILL,
    prompt_only,
)
from quire.replicas.prompt_keys import prompt_keys
from quire.replicas.routing import Router, Sent
from quire.request_options import DEFAULT_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

log = logging.getLogger("quire.server")

MOST_TRIES = 2  # of one request: what kills its engine does not go on to kill them all
MOST_MISSES = 8  # of one request: replicas that were gone when it came
READING_LOAD = 4096  # tokens: what is computed while an adapter is read and loaded, or more
ANSWER_LOAD = 64  # tokens: what a request weighs besides the part of its prompt to compute
LOST = "The replica that was computing this answer has ended; ask again."
LONG_WAIT = "No replica could take the request in {:.0f} s; try again later."


class Member(Protocol):
    """One of several engines."""

    load: float  # tokens that its open requests have it compute

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def client(self) -> EngineLink | None: ...

    @property
    def is_up(self) -> bool:
        """Whether it may be given work."""

    def as_dict(self) -> dict[str, Any]: ...


M = TypeVar("M", bound=Member)


@dataclass(eq=False)
class _Routed(Generic[M]):
    """An open request, and the replica that it was sent to."""

    handle: RequestHandle
    prompt_ids: TokenIds
    params: Params
    options: RequestOptions
    keys: list[bytes]
    role: str = DECODE  # of the replica it is for
    handover: asyncio.Task[None] | None = None
    replica: M | None = None
    sent: Sent | None = None
    load: float = 0.0
    num_tries: int = 0
    num_misses: int = 0
    deadline: asyncio.TimerHandle | None = None  # while no replica has it

    def stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class Dispatcher(Generic[M]):
    """The requests of a fleet; everything is called from one event loop."""

    # Known when the first replica is up; the same of all.
    limits: Limits
    tokenizer: Tokenizer | None
    namespace: Namespace | None  # of their blocks; None: they keep none
    pooling: PoolingFacts | None = None  # of a model that gives embeddings or classes

    def __init__(self, replicas: list[M], router: Router) -> None:
        self.replicas = replicas
        self.died = asyncio.Event()  # no replica is left, and none will be started
        self._router = router
        self._numbers = itertools.count(1)
        self._open: dict[int, _Routed[M]] = {}
        self._unplaced: dict[int, _Routed[M]] = {}  # those that wait for a replica to be up

    def submit(
        self,
        prompt_ids: TokenIds,
        params: Params,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        changed: asyncio.Event | None = None,
    ) -> RequestHandle:
        """As one engine's; where no replica is up, it waits for one, for as long as in a queue."""
        if self.died.is_set():
            raise EngineDied(DIED)
        keys = self._keys(prompt_ids, options)
        handle = RequestHandle(next(self._numbers), len(prompt_ids), changed or asyncio.Event())
        each = self._open[handle.number] = _Routed(handle, prompt_ids, params, options, keys)
        self._place(each)
        return handle

    def _keys(self, prompt_ids: TokenIds, options: RequestOptions) -> list[bytes]:
        """What the router knows a prompt by; a text that is only read is like any other."""
        if self.namespace is None:
            return []
        return prompt_keys(self.namespace, prompt_ids, options.cache_salt, _adapter(options))

    def _place(self, each: _Routed[M]) -> None:
        by_name = self._able(each.role)
        if not by_name:
            self._hold(each)
            return
        each.stop_waiting()
        adapter = _adapter(each.options)
        loads = {name: _load(replica, adapter) for name, replica in by_name.items()}
        name, num_blocks = self._router.choose(each.keys, loads)
        replica = by_name[name]
        if each.handover is None and self._needs_handover(each, replica, num_blocks):
            each.handover = asyncio.create_task(self._hand_over(each))
            return
        each.replica = replica
        assert replica.client is not None
        cached = num_blocks * self.namespace.block_size if self.namespace else 0
        each.load = each.handle.num_prompt_tokens - cached + ANSWER_LOAD
        each.num_tries += 1
        each.sent = self._router.begin(name, each.keys)
        replica.load += each.load
        if adapter:
            replica.client.note_adapter(adapter)
        request = pack_request(each.prompt_ids, each.params, each.options)
        replica.client.place(each.handle, request)

    def _able(self, role: str) -> dict[str, M]:
        """Those that are up and have the role; if none is, all that are up: roles may wait."""
        up = [replica for replica in self.replicas if replica.is_up]
        able = [replica for replica in up if replica.role in (role, BOTH)]
        return {replica.name: replica for replica in able or up}

    def _needs_handover(self, each: _Routed[M], replica: M, num_blocks: int) -> bool:
        """Whether its prompt is for others to compute than the replica it is for."""
        is_long = len(each.keys) - num_blocks >= LEAST_BLOCKS
        others = [r for r in self.replicas if r.is_up and r.role == PREFILL]
        return each.role == replica.role == DECODE and is_long and bool(others)

    async def _hand_over(self, each: _Routed[M]) -> None:
        """Have the prompt computed by a prefill replica first, and go on whatever becomes of it."""
        assert self.namespace is not None
        known = each.prompt_ids[: len(each.keys) * self.namespace.block_size]
        handle = RequestHandle(next(self._numbers), len(known), asyncio.Event())
        options = prompt_only(each.options)
        first: _Routed[M] = _Routed(handle, known, NO_ANSWER, options, each.keys, PREFILL)
        self._open[handle.number] = first
        try:
            self._place(first)
            await asyncio.wait_for(_until_finished(handle), PATIENCE_S)
            each.options = replace(each.options, handed_over=handle.error is None)
        except asyncio.TimeoutError:
            log.warning("A prefill replica took too long; the prompt is computed where it is used.")
        except Exception:
            log.exception("A handover failed.")
        finally:
            self.close(handle)
        if not each.handle.finished:
            self._place(each)

    def _hold(self, each: _Routed[M]) -> None:
        """The request waits for a replica, for `queue_s` at most."""
        self._unplaced[each.handle.number] = each
        patience = each.options.queue_s
        if patience is not None and each.deadline is None:
            loop = asyncio.get_running_loop()
            each.deadline = loop.call_later(patience, self._turn_away, each, patience)

    def _turn_away(self, each: _Routed[M], waited: float) -> None:
        if self._unplaced.pop(each.handle.number, None) is not None:
            each.handle.fail(RequestFailed(LONG_WAIT.format(waited), "queue"))

    def _take_back(self, handle: RequestHandle, arrived: bool = True) -> None:
        """The replica is gone: another one computes the request, unless an update was taken.

        A request that never `arrived` there has not used up a try, but misses are bounded, too.
        """
        each = self._open.get(handle.number)
        if each is None:
            return
        self._release(each)
        each.num_tries -= not arrived
        each.num_misses += not arrived
        is_enough = each.num_tries >= MOST_TRIES or each.num_misses >= MOST_MISSES
        if handle.was_read or is_enough:
            handle.fail(EngineDied(LOST))
            return
        handle.begin_again()
        self._place(each)

    def _release(self, each: _Routed[M]) -> None:
        if each.replica is not None and each.sent is not None:
            self._end(each.sent, each.replica)
            each.replica.load -= each.load
            each.replica = each.sent = None

    def _end(self, sent: Sent, replica: M) -> None:
        self._router.end(sent)

    def close(self, handle: RequestHandle) -> None:
        """The caller waits for the request no longer: end it, if it has not ended."""
        each = self._open.pop(handle.number, None)
        if each is None:
            return
        self._unplaced.pop(handle.number, None)
        each.stop_waiting()
        if each.handover is not None:
            each.handover.cancel()
        replica = each.replica
        self._release(each)
        if replica is not None and replica.client is not None:
            replica.client.close(handle)

    def abandon(self, why: str) -> None:
        """End all open requests with an error."""
        for replica in self.replicas:
            if replica.client is not None:
                replica.client.abandon(why)
        self._unplaced.clear()
        for each in self._open.values():
            if each.handover is not None:
                each.handover.cancel()
            if not each.handle.finished:  # it was with no replica
                each.handle.fail(RequestFailed(why, "shutdown"))

    def give_up(self) -> None:
        """No replica will come any more."""
        self.died.set()
        for each in self._open.values():
            if not each.handle.finished:
                each.handle.fail(EngineDied(DIED))

    def take_waiting(self) -> None:
        """A replica is up: send it the requests that have waited for one."""
        waiting, self._unplaced = self._unplaced, {}
        for each in waiting.values():
            self._place(each)

    # --- how things are -----------------------------------------------------------------------

    @property
    def engines(self) -> Mapping[str, EngineLink]:
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
        return len(self._unplaced) + sum(r.client.num_waiting for r in self.replicas if r.client)

    @property
    def num_waiting_tokens(self) -> int:
        unplaced = sum(each.handle.num_prompt_tokens for each in self._unplaced.values())
        return unplaced + sum(r.client.num_waiting_tokens for r in self.replicas if r.client)


def _adapter(options: RequestOptions) -> str:
    """The fingerprint of the request's adapter, "" without."""
    return "" if options.lora_request is None else options.lora_request.fingerprint


def _load(replica: Member, adapter: str) -> float:
    """What it has to do before a request, to read the adapter first counted in."""
    client = replica.client
    has_it = not adapter or (client is not None and adapter in client.adapters)
    return replica.load + (0 if has_it else READING_LOAD)


async def _until_finished(handle: RequestHandle) -> None:
    while not handle.finished:
        await handle.changed.wait()
        handle.changed.clear()
