"""Loads that come layer by layer, so that a model can begin before all layers are there.

slower tiers    whole images first: only then is it known how many blocks there will be
host memory     layer 0 of all blocks, layer 1 of all blocks, …
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from quire.checks import shown
from quire.errors import KVError
from quire.kv.image import BlockName
from quire.kv.loads import Found, Item, Load, Loader, or_miss
from quire.kv.pools.block_pool import Transfer


class LayerLoad(Load):
    """A load whose layers can be waited for.

    Once the first of them is there, `num_coming` says how many blocks, from the first on, all
    layers will have.
    """

    def __init__(self, count: int, num_layers: int | None = None) -> None:
        """`num_layers`: where the pool knows."""
        super().__init__(count)
        self._num_layers = num_layers
        self.num_coming = 0
        self.below: Load | None = None  # its blocks that host memory did not have
        self._transfers: list[Transfer] = []
        self._changed = threading.Condition()

    def wait_for_layer(self, layer: int, timeout: float | None = None) -> bool:
        """Wait until this layer of the coming blocks is there; False if it is not by then.

        On a GPU it is there for what this thread's current stream does next. It is False, too,
        where a copy failed: then the load is over, and `num_loaded` blocks are there.
        """
        if layer not in range(self._num_layers or sys.maxsize):
            has = "" if self._num_layers is None else f", and the pool has {self._num_layers}"
            raise KVError(f"There is no layer {shown(layer)}: they are counted from 0{has}.")

        def is_known() -> bool:
            return len(self._transfers) > layer or self.done()

        with self._changed:
            if not self._changed.wait_for(is_known, timeout):
                return False
        if layer >= len(self._transfers):
            return self.num_loaded >= self.num_coming
        event = self._transfers[layer].event
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return True

    def note_layer(self, transfer: Transfer) -> None:
        """The next layer is on its way."""
        with self._changed:
            self._transfers.append(transfer)
            self._changed.notify_all()

    def cancel(self) -> None:
        super().cancel()
        if self.below is not None:
            self.below.cancel()

    def end(self) -> None:
        super().end()
        with self._changed:
            self._changed.notify_all()


class LayerLoader(Loader):
    """Runs loads of both kinds."""

    def start_by_layer(
        self,
        load: LayerLoad,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Sequence[Any],
    ) -> None:
        """As `start`; the blocks in host memory are copied when all others are there."""
        after, started = self.pool.mark(), time.perf_counter()
        below: list[Item] = []
        here: list[Item] = []
        for at, each in enumerate(found):
            item = Item(at, names[at], blocks[at], each.slot)
            (here if each.place == self.host.name else below).append(item)
        load.below = first = Load(len(below), [item.at for item in below])

        def go_on() -> None:
            copy = partial(self._copy_layers, load, first, below, here, after, started)
            self._copies.submit(copy)

        first.call_at_end(go_on)
        if not below:
            first.end()
            return
        of_first = [found[item.at] for item in below]
        self.start(first, [i.name for i in below], of_first, [i.block for i in below])

    def _copy_layers(
        self,
        load: LayerLoad,
        first: Load,
        below: Sequence[Item],
        here: list[Item],
        after: torch.cuda.Event | None,
        started: float,
    ) -> None:
        arrived = [item for item, there in zip(below, first.arrived, strict=True) if there]
        missing = [item for item, there in zip(below, first.arrived, strict=True) if not there]
        load.num_coming = min((item.at for item in missing), default=len(below) + len(here))
        load.mark(missing, there=False)
        load.mark(arrived, there=True)
        useful = list(takewhile(load.wants, here))
        others = here[len(useful) :]
        self._release(others)
        load.mark(others, there=False)
        if useful:
            or_miss(load, useful, partial(self._begin_layers, load, useful, after, started))()

    def _begin_layers(
        self, load: LayerLoad, items: list[Item], after: torch.cuda.Event | None, started: float
    ) -> None:
        slots, blocks = [item.slot for item in items], [item.block for item in items]
        images, group = self.host.memory.images, items[0].name.group
        transfer = Transfer()
        try:
            for transfer in self.pool.from_host_by_layer(images, slots, blocks, after, group):
                load.note_layer(transfer)
        except Exception:
            transfer.wait()  # layers before are still being copied out of these slots
            self._release(items)
            raise
        land = partial(self._land, load, items, self.host.name, transfer, started)
        self._completions.submit(or_miss(load, items, land))
