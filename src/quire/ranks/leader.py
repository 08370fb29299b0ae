"""Rank 0's side: it starts the other ranks, tells them what to do, and notices when one is lost.

Each follower is a process with two sockets: one for what all ranks do together, in order, and one
for what goes on beside that. It ends when they close. Whatever ends one of them ends all.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.errors import REFUSALS, ConfigError, EngineFailed, QuireError, kind_of
from quire.kv.tiers.memory import HostMemory
from quire.layers.tp import TensorParallel
from quire.ranks import cores, watchdog
from quire.ranks.group import Group, PeerLost
from quire.ranks.process import LOST_ITS_PEERS, REASON_S, Follower
from quire.ranks.wire import VERSION, Array, Head, WireClosed, pack, receive, send

log = logging.getLogger("quire")

EXIT_S = 10.0  # for a process that was told to end
MEETING_S = 120.0  # for all that have loaded their parts to find each other
ANSWER_S = 1.0  # for a rank to say where it is


class Ranks:
    """All ranks of one model, as rank 0 sees them. Close it, or they stay."""

    def __init__(self, config: EngineConfig, device: torch.device, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("tensor_parallel_size above 1 needs Linux; leave it at 1 here.")
        self.size = size
        self._device = device
        # Two files without names: nothing is left of them when the last process has ended.
        self._meeting = os.memfd_create("quire meeting")
        self._memory = os.memfd_create("quire images")
        self.group = Group(0, size, device, self._meeting)
        self.tp = TensorParallel(0, size, self.group, config.enable_expert_parallel)
        self._failure: QuireError | None = None  # while loading a refusal, else EngineFailed
        self._changed = threading.Condition()  # of what followers said, or of the failure
        self._copies: dict[int, int] = {}  # under way, and how many followers are not done
        self._numbers = count()
        self._telling = threading.Lock()  # adapters are read by a thread that does not step
        self._closed = False
        self._is_loading, self._is_meeting = True, False
        self._watchdog = watchdog.Watchdog(self._stuck, watchdog.STARTING_S)
        self._threads = cores.take_part(size if device.type == "cpu" else 1)
        self.followers: list[Follower] = []
        try:
            for rank in range(1, size):
                self.followers.append(Follower(rank, self._meeting, self._memory))
            for follower in self.followers:
                self._start(follower, config, device)
        except BaseException:
            self.close()
            raise

    def _start(self, follower: Follower, config: EngineConfig, device: torch.device) -> None:
        settings = {
            "version": VERSION,
            "rank": follower.rank,
            "size": self.size,
            "device": [device.type, device.index],
            "threads": self._threads,
            "stuck_s": watchdog.STUCK_S,
            "config": asdict(config),
        }
        for sock in (follower.orders, follower.copies):
            listen = threading.Thread(
                target=self._listen,
                args=(follower, sock),
                name=f"quire rank {follower.rank}",
                daemon=True,
            )
            listen.start()
        self._send(follower.orders, pack(settings))

    # --- talking ------------------------------------------------------------------------------

    def tell(self, head: Head, arrays: Sequence[Array] = ()) -> None:
        """All followers, in the order of what is told."""
        self.check()
        message = pack(head, arrays)
        with self._telling:
            for follower in self.followers:
                self._send(follower.orders, message)

    def _send(self, sock: socket.socket, message: bytes) -> None:
        try:
            send(sock, message)
        except WireClosed as error:
            raise self._explained("telling the others", error) from error

    def hear(self, what: str) -> list[Any]:
        """What each follower says about this, waited for."""
        with self._watchdog.call(f"waiting for what the ranks say about {what}"), self._changed:
            while not all(what in follower.said for follower in self.followers):
                self.check()
                self._changed.wait()
        return [follower.said.pop(what) for follower in self.followers]

    def _listen(self, follower: Follower, sock: socket.socket) -> None:
        try:
            while True:
                head, _ = receive(sock)
                if "refused" in head and self._is_loading:
                    kinds = {kind.__name__: kind for kind in REFUSALS}
                    self._end(kinds[head["kind"]](head["refused"]))
                    return
                if "failed" in head:
                    self._fail(f"Rank {follower.rank} of {self.size} failed: {head['failed']}")
                    return
                with self._changed:
                    if "copied" in head:
                        self._copies[head["copied"]] -= 1
                    else:
                        follower.said.update(head)
                    self._changed.notify_all()
        except WireClosed:
            if sock is follower.orders and not self._closed:
                self._lost(follower)

    # --- working together -----------------------------------------------------------------------

    def meet(self, moves_kv: bool) -> None:
        """Once all have loaded their parts: from now on they work together."""
        self.hear("loaded")
        self._is_loading = False
        self.tell({"moves_kv": moves_kv})
        # In a thread: it would wait for minutes for a rank that is lost right now.
        over: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        connecting = threading.Thread(target=self._connect, args=(over,), daemon=True)
        connecting.start()
        self._is_meeting = True
        with self.together("meeting"):
            end = time.monotonic() + MEETING_S
            while over.empty():
                self.check()
                if time.monotonic() > end:
                    raise PeerLost(f"not all were there within {MEETING_S:g} s")
                time.sleep(0.01)
            self._is_meeting = False
            if (error := over.get()) is not None:
                raise error

    def _connect(self, over: queue.SimpleQueue[Exception | None]) -> None:
        try:
            self.group.connect()
            over.put(None)
        except Exception as error:
            over.put(error)

    def start_work(self) -> None:
        """Once all are ready: from now on nothing takes long."""
        self.hear("ready")
        self._watchdog.stop()
        self._watchdog = watchdog.Watchdog(self._stuck, watchdog.STUCK_S)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what rank 0 does while the others do the same: what breaks it ends them all."""
        self.check()
        try:
            with self._watchdog.call(what, lambda: self.group.num_calls):
                yield
        except EngineFailed:
            raise
        except BaseException as error:
            raise self._explained(what, error) from error
        self.check()

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Around what rank 0 does alone, but what may wait for the others."""
        with self._watchdog.call(what):
            try:
                yield
            except Exception:
                self.check()
                raise
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- beside that ----------------------------------------------------------------------------

    def share_memory(self, image_bytes: int, num_slots: int, pinned: bool) -> HostMemory:
        """Memory for images that all ranks can reach."""
        memory = HostMemory(image_bytes, num_slots, pinned, self._memory)
        size = {"image_bytes": image_bytes, "num_slots": num_slots}
        self._tell_beside({"do": "memory", **size, "pinned": pinned})
        return memory

    def begin_copy(self, do: str, blocks: Sequence[int], slots: Sequence[int], group: int) -> int:
        """Let each follower copy its shards of a KV group; returns a number to `end_copy` with."""
        number = next(self._numbers)
        self._copies[number] = len(self.followers)
        pairs = [np.asarray(blocks, dtype=np.int64), np.asarray(slots, dtype=np.int64)]
        self._tell_beside({"do": do, "number": number, "group": group}, pairs)
        return number

    def is_copied(self, number: int) -> bool:
        self.check()
        return not self._copies.get(number)

    def end_copy(self, number: int) -> None:
        """Wait until every follower has copied its shards."""
        with self._watchdog.call("copying blocks between device and host"), self._changed:
            while not self.is_copied(number):
                self._changed.wait()
            del self._copies[number]

    def read_adapter(self, path: str) -> list[dict[str, str]]:
        """Let each follower read its part of an adapter, and wait for what they say about it.

        They begin when they have done all that was told before: what was to be forgotten is.
        """
        self.tell({"do": "read_adapter", "path": path})
        return self.hear("adapter")

    def _tell_beside(self, head: Head, arrays: Sequence[Array] = ()) -> None:
        self.check()
        message = pack(head, arrays)
        for follower in self.followers:
            with follower.sending:
                self._send(follower.copies, message)

    # --- failing --------------------------------------------------------------------------------

    def _explained(self, what: str, error: BaseException) -> QuireError:
        """Why that was, as far as a lost rank is the reason; else the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, REASON_S)
        if not isinstance(error, QuireError):
            log.error("Rank 0 failed in %s.", what, exc_info=error)
        self._fail(f"Rank 0 of {self.size} failed in {what}: {kind_of(error)}")
        assert self._failure is not None
        return self._failure

    def _lost(self, follower: Follower) -> None:
        how = follower.how_it_ended()
        if follower.process.returncode == LOST_ITS_PEERS:
            with self._changed:  # another rank failed first, which is reported
                self._changed.wait_for(lambda: self._failure is not None, REASON_S)
        self._fail(f"Rank {follower.rank} of {self.size} {how}")

    def _stuck(self, what: str) -> None:
        for follower in self.followers:
            follower.ask_where()
        with self._changed:
            everyone = lambda: all("where" in each.said for each in self.followers)  # noqa: E731
            self._changed.wait_for(everyone, ANSWER_S)
        at = [(each.rank, each.said.get("where", "silent")) for each in self.followers]
        at = [(0, self.group.last_call), *at]
        places = ", ".join(f"rank {rank}: {place}" for rank, place in at)
        why = f"The ranks have been stuck in {what} for {self._watchdog.bound:g} s ({places})"
        log.error("%s.", why)  # the waiting thread may never get to report it
        self._fail(why)

    def _fail(self, why: str) -> None:
        self._end(EngineFailed(f"{why.rstrip('.')}; the engine has ended, start a new one."))

    def _end(self, failure: QuireError) -> None:
        """Keep the first reason, and end all waiting between ranks."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = failure
            self._changed.notify_all()
        for follower in self.followers:
            follower.process.kill()
        self.group.abort()

    def close(self) -> None:
        """End the other ranks, whatever they are doing."""
        if self._closed:
            return
        self._closed = True
        self._watchdog.stop()
        for follower in self.followers:
            follower.end(0.0 if self._failure else EXIT_S)
        self.group.abort()
        self.group.close()
        for follower in self.followers:
            follower.orders.close()
            follower.copies.close()
        if not self._is_meeting:  # else a rank waits there, and must not find another's file
            os.close(self._meeting)
        os.close(self._memory)
        cores.give_back(self.size if self._device.type == "cpu" else 1)
