"""The cores of a CPU, dealt out to the ranks on it."""

from __future__ import annotations

import torch

_usual = 0  # threads of this process without ranks
_sizes: list[int] = []  # of ranks, of each engine that shares this process's cores


def take_part(size: int) -> int:
    """Let this process leave room for the others of `size` ranks; returns the threads of each."""
    global _usual
    if not _sizes:
        _usual = torch.get_num_threads()
    _sizes.append(size)
    return _set_threads()


def give_back(size: int) -> None:
    _sizes.remove(size)
    _set_threads()


def _set_threads() -> int:
    threads = max(1, _usual // max(_sizes, default=1))
    torch.set_num_threads(threads)
    return threads
