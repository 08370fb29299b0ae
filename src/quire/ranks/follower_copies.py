"""What a follower does beside its steps: copy shards to host memory and back, read adapters, say
where it is."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.kv.job_queue import JobQueue
from quire.kv.tiers.memory import HostMemory
from quire.ranks.follower_rank import FollowerRank
from quire.ranks.wire import Array, Head, WireClosed, pack, receive, send


class SharedSlots:
    """This rank's part of every slot of the memory that all ranks share."""

    def __init__(self, file: int, rank: int, head: Head) -> None:
        image_bytes, self._pinned = head["image_bytes"], head["pinned"]
        self._memory = HostMemory(image_bytes, head["num_slots"], self._pinned, file, guest=True)
        self._rank = rank
        self._num_ready = 0
        self._changed = threading.Condition()
        self._memory.make_ready(self._ready)

    def shards(self, size: int) -> Tensor:
        """This rank's shards of images, each of so many bytes, one row a slot."""
        return self._memory.images[:, self._rank * size : (self._rank + 1) * size]

    def images(self, size: int) -> Tensor:
        """Images of so many bytes that all ranks have alike."""
        return self._memory.images[:, :size]

    def _ready(self, slots: range) -> None:
        with self._changed:
            self._num_ready = slots.stop
            self._changed.notify_all()

    def wait_for(self, slots: list[int]) -> None:
        """Until they are pinned here, too; rank 0 may have been quicker."""
        with self._changed:
            self._changed.wait_for(lambda: max(slots, default=-1) < self._num_ready)


class FollowerCopies:
    """A thread that receives orders, and a job queue for each direction."""

    def __init__(
        self,
        sock: socket.socket,
        file: int,
        follower: FollowerRank,
        fail: Callable[[Exception], None],
    ) -> None:
        self._socket = sock
        self._file = file
        self._follower = follower
        self._fail = fail
        self._sending = threading.Lock()
        self._slots: SharedSlots
        self._queues = {"to_host": JobQueue("copies out"), "from_host": JobQueue("copies in")}

    def start(self) -> None:
        threading.Thread(target=self._listen, name="quire follower copies", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._obey(*receive(self._socket))
        except WireClosed:
            os._exit(0)  # rank 0 has gone

    def _obey(self, head: Head, arrays: list[Array]) -> None:
        do, follower = head["do"], self._follower
        if do == "where":
            self._say({"where": follower.where()})
        elif do == "memory":
            self._slots = SharedSlots(self._file, follower.rank, head)
        else:
            blocks, slots = (array.tolist() for array in arrays)
            copy = partial(self._copy, do, head["number"], blocks, slots, head["group"])
            self._queues[do].submit(copy)

    def _copy(self, do: str, number: int, blocks: list[int], slots: list[int], group: int) -> None:
        try:
            pool = self._follower.runner.cache
            whole = pool.layout.is_replicated
            images = (self._slots.images if whole else self._slots.shards)(pool.image_bytes[group])
            self._slots.wait_for(slots)
            if do == "to_host":
                pool.to_host(blocks, images, slots, group=group).wait()
            else:
                pool.from_host(images, slots, blocks, group=group).wait()
            self._say({"copied": number})
        except WireClosed:
            pass
        except Exception as error:
            self._fail(error)

    def _say(self, head: Head) -> None:
        with self._sending:
            send(self._socket, pack(head))
