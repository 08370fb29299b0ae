"""A runner's adapters: those in host memory, those in slots, and which rows of a step use them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.adapters import AdapterBatch, SortedRows, most_tiles, tile_rows
from quire.layers.adapters.image import AdapterImage
from quire.models.adapters.adapter import Adapter
from quire.models.adapters.model_adapters import ModelAdapters
from quire.runner.plan import AdapterInfo, Ints, StepPlan
from quire.runner.transfer import BY_COPY_ENGINES, HostLink


class RunnerAdapters:
    """`read_folder` reads a `peft` folder and checks it against the model."""

    def __init__(
        self,
        slots: ModelAdapters,
        read_folder: Callable[[str], Adapter],
        link: HostLink = BY_COPY_ENGINES,
    ) -> None:
        self.slots, self.read_folder, self.link = slots, read_folder, link
        self._images: dict[str, AdapterImage] = {}  # in host memory, by fingerprint

    def read(self, path: str) -> AdapterInfo:
        """Read an adapter into host memory; another thread may step meanwhile."""
        adapter = self.read_folder(path)
        image = self._images.get(adapter.fingerprint)
        if image is None:
            image = self.slots.image(adapter)
            if self.slots.device.type == "cuda":
                image = image.pinned()
            self._images[adapter.fingerprint] = image
        return AdapterInfo(adapter.fingerprint, adapter.rank, image.num_bytes)

    def forget(self, fingerprint: str) -> None:
        """Give its host memory back; copies that are under way keep it until they are done."""
        self._images.pop(fingerprint, None)

    @torch.inference_mode()
    def load(self, fingerprint: str, slot: int) -> None:
        """Copy it into a slot: after the steps launched before, and before later ones."""
        self.slots.store(slot, self._images[fingerprint])

    def batch(self, row_slots: Ints) -> AdapterBatch:
        """That of a pass whose rows use these slots."""
        device, rows = self.slots.device, SortedRows.of(row_slots)
        if device.type != "cuda":
            none = torch.empty(0, dtype=torch.int32)
            return AdapterBatch(torch.from_numpy(row_slots), none, none, 1, rows.groups())
        size = tile_rows(len(row_slots))
        tiles = np.empty((3, most_tiles(len(row_slots), self.slots.count)), dtype=np.int32)
        rows.write_tiles(size, tiles)
        arrays = [row_slots, rows.order, tiles]
        slots, order, on_device = self.link.all_to_device(arrays, device)
        indices = order.long()
        groups = tuple((slot, indices[begin:end]) for slot, begin, end in rows.bounds)
        return AdapterBatch(slots, order, on_device, size, groups)

    def head_batch(self, row_slots: Ints) -> AdapterBatch | None:
        """That of rows whose logits are computed, if an adapter of theirs changes the head."""
        changing = self.slots.head.of_head
        if not any(slot in changing for slot in row_slots.tolist()):
            return None
        return self.batch(row_slots)

    def changes_embedding(self, plan: StepPlan) -> bool:
        """Whether an adapter of the step changes embeddings, which no graph has recorded."""
        changing = self.slots.embedding.of_rows
        return any(slot in changing for slot in plan.adapter_slots.tolist())


def row_slots(plan: StepPlan) -> Ints:
    """The slot of each row of a step in which some sequence has an adapter."""
    if plan.is_decode:
        return plan.adapter_slots
    return np.repeat(plan.adapter_slots, plan.counts)
