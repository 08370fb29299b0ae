"""A runner's adapters: those in host memory, those in slots, and which rows of a step use them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from quire.kernels.adapter_slots import (
    NO_ADAPTER,
    AdapterBatch,
    Rows,
    SortedRows,
    most_tiles,
    tile_rows,
)
from quire.models.adapters.adapter import Adapter
from quire.models.adapters.model_adapters import ModelAdapters
from quire.runner.adapter_staging import KeptAdapter, NoStaging, Staging
from quire.runner.plan import AdapterInfo, Ints, StepPlan
from quire.runner.recorded_steps import MOST_SEQUENCES
from quire.runner.transfer import BY_COPY_ENGINES, Array, HostLink, staged


class RunnerAdapters:
    """`read_folder` reads a `peft` folder and checks it against the model."""

    def __init__(
        self,
        slots: ModelAdapters,
        read_folder: Callable[[str], Adapter],
    ) -> None:
        self.slots, self.read_folder = slots, read_folder
        self._kept: dict[str, KeptAdapter] = {}  # in host memory, by fingerprint
        on_gpu = slots.device.type == "cuda"
        self._staging = Staging(slots.packed_bytes, slots.device) if on_gpu else NoStaging()
        self._recorded_rows: RecordedRows | None = None
        if not on_gpu:
            self._recorded_rows = RecordedRows(slots, MOST_SEQUENCES)

    @property
    def num_bytes(self) -> int:
        """What slots, and the way into them, take of the device's memory."""
        return self.slots.num_bytes + self._staging.num_bytes

    def read(self, path: str) -> AdapterInfo:
        """Read an adapter into host memory; another thread may step meanwhile."""
        adapter = self.read_folder(path)
        kept = self._kept.get(adapter.fingerprint)
        if kept is None:
            kept = self._kept[adapter.fingerprint] = self._staging.keep(self.slots.image(adapter))
        return AdapterInfo(adapter.fingerprint, adapter.rank, kept.num_bytes)

    def forget(self, fingerprint: str) -> None:
        """Give its host memory back; copies that are under way keep it until they are done."""
        self._kept.pop(fingerprint, None)

    @torch.inference_mode()
    def load(self, fingerprint: str, slot: int) -> None:
        """Copy it into a slot: after the steps launched before, and before later ones."""
        with self._staging.brought(self._kept[fingerprint]) as image:
            self.slots.store(slot, image)

    def batch(self, row_slots: Ints, link: HostLink = BY_COPY_ENGINES) -> AdapterBatch:
        """That of a pass whose rows use these slots."""
        device, rows = self.slots.device, SortedRows.of(row_slots)
        if device.type != "cuda":
            return rows.on(device)
        count = self.slots.count
        size = tile_rows(len(row_slots), count)
        tiles = np.empty((3, most_tiles(len(row_slots), count)), dtype=np.int32)
        rows.write_tiles(size, tiles)
        arrays = [row_slots, rows.order, tiles]
        slots, order, on_device = link.all_to_device(arrays, device)
        indices = order.long()
        groups = tuple((slot, indices[begin:end]) for slot, begin, end in rows.bounds)
        return AdapterBatch(slots, order, on_device, size, groups, row_slots, rows.long_runs())

    def over(self, plan: StepPlan, link: HostLink) -> AbstractContextManager[None]:
        """Around the layers of a step; on a CPU, where a recorded one reads it if it may be."""
        slots, recorded = row_slots(plan), self._recorded_rows
        if recorded is None or len(slots) > MOST_SEQUENCES:
            return self.slots.over(self.batch(slots, link))
        recorded.load(len(slots), slots)
        return recorded.over(len(slots))

    def over_head(
        self, plan: StepPlan, rows: Array, link: HostLink
    ) -> AbstractContextManager[None]:
        """Around the logits of some rows of a step, whose adapters may change the head."""
        used, changing = row_slots(plan)[rows], self.slots.head.of_head
        is_changed = any(slot in changing for slot in used.tolist())
        return self.slots.over(self.batch(used, link) if is_changed else None)

    def changes_embedding(self, plan: StepPlan) -> bool:
        """Whether an adapter of the step changes embeddings, which no graph has recorded."""
        changing = self.slots.embedding.of_rows
        return any(slot in changing for slot in plan.adapter_slots.tolist())


def row_slots(plan: StepPlan) -> Ints:
    """The slot of each row of a step in which some sequence has an adapter."""
    if plan.is_decode:
        return plan.adapter_slots
    return np.repeat(plan.adapter_slots, plan.counts)


class RecordedRows:
    """Which slots the rows of recorded steps use, at addresses that they read."""

    def __init__(self, slots: ModelAdapters, most_rows: int) -> None:
        self.slots = slots
        size = max(  # of more rows there may be fewer tiles
            self._tiles_at(rows) + 3 * most_tiles(rows, slots.count)
            for rows in range(1, most_rows + 1)
        )
        self._packed = torch.zeros(size, dtype=torch.int32, device=slots.device)
        self._groups: tuple[tuple[int, Rows], ...] = ()  # on a CPU, of the last step

    def load(self, rows: int, used: Ints) -> None:
        """A step of `rows`, the first of which use these slots, the others none."""
        padded = np.full(rows, NO_ADAPTER, dtype=np.int32)
        padded[: len(used)] = used
        ordered, tiles_at = SortedRows.of(padded), self._tiles_at(rows)
        number = most_tiles(rows, self.slots.count)
        with staged(tiles_at + 3 * number, self._packed) as packed:
            packed[:rows] = padded
            packed[tiles_at // 2 : tiles_at // 2 + rows] = ordered.order
            size = tile_rows(rows, self.slots.count)
            ordered.write_tiles(size, packed[tiles_at:].reshape(3, number))
        if self.slots.device.type == "cpu":
            self._groups = ordered.groups()

    def over(self, rows: int) -> AbstractContextManager[None]:
        """Around the layers of a step of so many rows."""
        tiles_at, number = self._tiles_at(rows), most_tiles(rows, self.slots.count)
        tiles = self._packed[tiles_at : tiles_at + 3 * number].view(3, number)
        order = self._packed[tiles_at // 2 : tiles_at // 2 + rows]
        slots, size = self._packed[:rows], tile_rows(rows, self.slots.count)
        host_slots = slots.numpy() if self.slots.device.type == "cpu" else None
        return self.slots.over(AdapterBatch(slots, order, tiles, size, self._groups, host_slots))

    @staticmethod
    def _tiles_at(rows: int) -> int:
        """Behind slots and order, each from an address for which kernels are compiled."""
        return 2 * (-(-rows // 16) * 16)
