"""A rank other than 0: builds its shard of the model, and runs the steps that rank 0 sends."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress

import torch

from quire.config import EngineConfig
from quire.errors import kind_of
from quire.kv.table import BlockCopy
from quire.layers.tp import TensorParallel
from quire.ranks import watchdog
from quire.ranks.group import Group
from quire.ranks.rank_model import RankModel, device_of, open_source
from quire.ranks.wire import Array, Head, WireClosed, pack, receive, send, step_in
from quire.runner.runner import ModelRunner

log = logging.getLogger("quire")


class FollowerRank:
    """What all ranks do together, in the order of rank 0."""

    def __init__(self, orders: socket.socket, meeting: int, settings: Head) -> None:
        self.rank, self.size = settings["rank"], settings["size"]
        self.orders = orders
        kind, index = settings["device"]
        first = torch.device(kind, index) if index is not None else torch.device(kind)
        self.device = device_of(self.rank, first)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(settings["threads"])
        self.config = EngineConfig(**settings["config"])
        self.group = Group(self.rank, self.size, self.device, meeting)
        self.watchdog = watchdog.Watchdog(self._stuck, watchdog.STARTING_S)
        self.stuck_s = settings["stuck_s"]
        self.runner: ModelRunner

    def build(self) -> None:
        """The same steps as rank 0 takes, which says when."""
        config = self.config
        source = open_source(config, self.device, progress=False)
        tp = TensorParallel(self.rank, self.size, self.group, config.enable_expert_parallel)
        model = RankModel(config, source, tp, self.device)
        with self.watchdog.call("loading"):
            model.load(progress=False)
        send(self.orders, pack({"loaded": True}))
        head, _ = receive(self.orders)
        with self.watchdog.call("starting", lambda: self.group.num_calls):
            self.group.connect()
            if self.device.type == "cuda":
                model.warm_up(head["moves_kv"])
            send(self.orders, pack({"blocks": model.count_blocks()}))
        head, _ = receive(self.orders)
        with self.watchdog.call("making the pool", lambda: self.group.num_calls):
            model.make_pool(head["num_blocks"])
            if model.has_graphs:
                model.record(head["max_model_len"])
        self.runner = model.runner()
        send(self.orders, pack({"ready": True}))
        self.watchdog.stop()
        # Rank 0 looks first, and says more; this is for when it is stuck itself.
        self.watchdog = watchdog.Watchdog(self._stuck, 2 * self.stuck_s)

    def obey(self, head: Head, arrays: list[Array]) -> None:
        do = head["do"]
        with self.watchdog.call(do, lambda: self.group.num_calls):
            getattr(self, f"_do_{do}")(head, arrays)

    def _do_step(self, head: Head, arrays: list[Array]) -> None:
        if head["fed"]:
            self.runner.share_drawn(head["fed"])
        self.runner.launch(step_in(head, arrays))

    def _do_copy_blocks(self, head: Head, arrays: list[Array]) -> None:
        copies: list[BlockCopy] = [(source, target) for source, target in arrays[0].tolist()]
        self.runner.copy_blocks(copies)

    def _do_free_memory(self, head: Head, arrays: list[Array]) -> None:
        self.runner.free_memory()

    def _do_read_adapter(self, head: Head, arrays: list[Array]) -> None:
        """That takes a while, and what is told next does not wait."""
        threading.Thread(target=self._read_adapter, args=(head["path"],), daemon=True).start()

    def _read_adapter(self, path: str) -> None:
        """Rank 0 has read it already, so that it can only fail here if it has changed since."""
        try:
            said = {"fingerprint": self.runner.read_adapter(path).fingerprint}
        except Exception as error:
            said = {"failed": kind_of(error)}
        with suppress(WireClosed):
            send(self.orders, pack({"adapter": said}))

    def _do_load_adapter(self, head: Head, arrays: list[Array]) -> None:
        self.runner.load_adapter(head["fingerprint"], head["slot"])

    def _do_forget_adapter(self, head: Head, arrays: list[Array]) -> None:
        self.runner.forget_adapter(head["fingerprint"])

    def where(self) -> str:
        """What this rank is doing, for rank 0's error message."""
        doing = self.watchdog.under_way
        return f"{doing}, {self.group.last_call}" if doing else "waiting to be told something"

    def _stuck(self, what: str) -> None:
        log.error("Rank %d has been stuck in %s for %g s.", self.rank, what, self.watchdog.bound)
        os._exit(1)
