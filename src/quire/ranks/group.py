"""What the ranks compute together: sums, gathers and broadcasts, by NCCL or by Gloo.

A group is torch's, but none of its global ones, so that several engines live in one process. Ranks
find each other through a file without a name, which each has inherited: no port, nothing to clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from quire.errors import QuireError

dist: Any = torch.distributed  # its stub leaves out half of what is used here

# The watchdog ends what is stuck; this is for a process that has none left.
TIMEOUT = timedelta(minutes=30)


class PeerLost(QuireError):
    """An exchange between ranks broke off: another rank has gone."""


class Group:
    """The ranks of one model; `connect` before the first exchange.

    `num_calls` and `last_call` tell how far this rank has come.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: int) -> None:
        """`meeting`: a file descriptor of the file by which the ranks find each other."""
        self.rank = rank
        self.size = size
        self.num_calls = 0
        self.last_call = "nothing"
        self._device = device
        self._meeting = meeting
        self._backend: Any = None
        self._is_silent = False
        self._reduce = dist.AllreduceOptions()
        self._gather = dist.GatherOptions()
        self._broadcast = dist.BroadcastOptions()
        for options in (self._reduce, self._gather, self._broadcast):
            if hasattr(options, "asyncOp"):
                options.asyncOp = False  # NCCL then works in the caller's stream

    def connect(self) -> None:
        """Connect to the other ranks, which have to do the same now."""
        store = dist.FileStore(f"/proc/self/fd/{self._meeting}", -1)  # which it is not to remove
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = TIMEOUT
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._backend = gloo(store, self.rank, self.size, options)
        # NCCL makes its connections at the first call, which no graph may record.
        self.all_reduce_(torch.zeros(1, device=self._device))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Compute as if there were no others, where only shapes and kernels matter."""
        self._is_silent = True
        yield
        self._is_silent = False

    def all_reduce_(self, tensor: Tensor) -> None:
        if not self._is_silent:
            self._do("all-reduce", lambda: self._backend.allreduce([tensor], self._reduce))

    def gather(self, part: Tensor) -> list[Tensor]:
        if self._is_silent:
            return [part] * self.size
        part = part.contiguous()
        parts: list[Tensor] = []
        if self.rank == 0:  # its own part stays where it is
            parts = [part, *(torch.empty_like(part) for _ in range(1, self.size))]
        places = [parts] if parts else []
        self._do("gather", lambda: self._backend.gather(places, [part], self._gather))
        return parts

    def broadcast_(self, tensor: Tensor) -> None:
        if not self._is_silent:
            self._do("broadcast", lambda: self._backend.broadcast([tensor], self._broadcast))

    def _do(self, name: str, call: Callable[[], Any]) -> None:
        self.num_calls += 1
        self.last_call = name
        try:
            work = call()
            if work is not None:
                work.wait()  # on a GPU, this lets the stream wait, not the host
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise PeerLost(f"an exchange between ranks broke off: {error}") from error

    def abort(self) -> None:
        """Let exchanges that wait for others fail; nothing more can be exchanged."""
        if self._backend is not None and self._device.type == "cuda":
            with suppress(RuntimeError):
                self._backend.abort()

    def close(self) -> None:
        """Only when no exchange is under way."""
        self._backend = None
