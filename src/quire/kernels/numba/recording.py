"""A pass whose kernels are recorded once and then run again: what a graph is on a GPU.

With few tokens a kernel takes less time than the Python around it. A recorded pass is a list of
launches, which all threads go through together, waiting for each other after each:

    thread 0   norm ─┤ q, k, v: part ─┤ turn ─┤ attention: a split ─┤ …
    thread 1         ├ q, k, v: part ─┤       ├ attention: a split ─┤ …

It reads and writes fixed addresses. While it is recorded, tensors are made in memory of its own.
Only what kernels do is recorded, so a pass that also needs torch to compute cannot be.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.lent_memory import lend
from quire.kernels.numba.kernel import OPENMP, Launch, launches
from quire.kernels.numba.kernels import replay_kernel


class Recording:
    """The launches of a pass; it `is_whole` unless torch computed something between them."""

    def __init__(self) -> None:
        self.is_whole = True
        self._launches: list[Launch] = []
        self.memory = _Memory()

    @contextmanager
    def record(self) -> Iterator[None]:
        with launches.noted_in(self._launches), _Watch(self):
            yield
        self._lay_out()

    def _lay_out(self) -> None:
        """All arguments in one piece, as they were before the kernels counted in them."""
        self._begin = b"".join(launch.arguments for launch in self._launches)
        self._arguments = ctypes.create_string_buffer(self._begin, len(self._begin))
        at = ctypes.addressof(self._arguments)
        calls = []
        for launch in self._launches:
            calls.append((launch.address, at))
            at += len(launch.arguments)
        self._calls = torch.tensor(calls, dtype=torch.int64)

    def replay(self) -> None:
        ctypes.memmove(self._arguments, self._begin, len(self._begin))
        threads = torch.get_num_threads()
        replay_kernel(
            torch.float32,
            threads,
            0,
            len(self._launches),
            self._calls.data_ptr(),
            OPENMP.team_size if threads > 1 else 0,
            OPENMP.give_way,
        )


class _Memory:
    """For the tensors of a pass: where one was is the place of the next of its size.

    Each has a piece of memory that says when no tensor has it any more; then it is free again.
    """

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = max(1, shape.numel() * dtype.itemsize)
        if not self._free[size]:
            self.pieces.append(torch.empty(size, dtype=torch.uint8))
            self._free[size].append(self.pieces[-1])
        piece = self._free[size].pop()
        return lend(piece, shape, dtype, self._free[size].append)


class _Watch(TorchDispatchMode):
    """Makes tensors in the recording's memory, and sees what else torch is asked for."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """There is nothing to skip, but to do so torch would import its compiler: seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._recording.memory.empty(
                torch.Size(args[0]), kwargs.get("dtype") or torch.float32
            )
        if func is torch.ops.aten.empty_like.default:
            return self._recording.memory.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        found = func(*args, **kwargs)
        if not (func.is_view and _share_memory(found, args)):
            self._recording.is_whole = False
        return found


def _share_memory(found: Any, arguments: Any) -> bool:
    """Whether tensors that may be views of the arguments, as `Tensor.to` and `contiguous` return
    them, really are."""
    places = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
    results = found if isinstance(found, (list, tuple)) else [found]
    return all(
        isinstance(each, Tensor) and each.untyped_storage().data_ptr() in places for each in results
    )
