"""A tiny model with weights of its own, of which every rank loads a part."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tiny_llm import write_config

from quire import LLM
from quire.models.source import open_model
from quire.ranks.follower import failure
from quire.ranks.follower_rank import FollowerRank
from quire.ranks.process import Follower
from quire.ranks.wire import WireClosed, pack, receive, send

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def write_weights(folder: Path, **changes: Any) -> Path:
    """Eight heads and two KV heads: two ranks have one each, and of four ranks two share one."""
    write_config(folder, **SHAPE | changes)
    source = open_model(str(folder), "dummy")
    save_file(dict(source.tensors()), str(folder / "model.safetensors"))
    return folder


def open_ranks(folder: Path, size: int, **settings: Any) -> LLM:
    basics = {"dtype": "float32", "device": "cpu", "use_tqdm": False, "block_size": 8}
    return LLM(str(folder), tensor_parallel_size=size, **basics | settings)


class NoProcess:
    """Where there is none that could be killed: the thread ends with its sockets."""

    returncode = None

    def kill(self) -> None:
        pass


class FollowerThread(Follower):
    """A follower in a thread of this process, ready at once; it has no part in lower tiers."""

    def __init__(self, rank: int, meeting: int, memory: int) -> None:
        self.rank, self.process = rank, NoProcess()
        self.orders, far_orders = socket.socketpair()
        self.copies, self._far_copies = socket.socketpair()
        self.sending, self.said = threading.Lock(), {}
        follow = threading.Thread(target=self._follow, args=(far_orders, os.dup(meeting)))
        self._thread = follow
        follow.daemon = True
        follow.start()

    def _follow(self, orders: socket.socket, meeting: int) -> None:
        with orders, suppress(WireClosed):
            try:
                follower = FollowerRank(orders, meeting, receive(orders)[0])
                follower.build()
                while True:
                    follower.obey(*receive(orders))
            except WireClosed:
                follower.watchdog.stop()
            except Exception as error:
                send(orders, pack(failure(error)))
            finally:
                follower.group.close()
                os.close(meeting)

    def how_it_ended(self) -> str:
        return "ended"

    def end(self, timeout: float) -> None:
        for sock in (self.orders, self.copies, self._far_copies):
            sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout)
        self._far_copies.close()


@contextmanager
def ranks_in_threads() -> Iterator[None]:
    """Ranks that are opened meanwhile start no process, which would import torch for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.ranks.leader.Follower", FollowerThread)
        yield
