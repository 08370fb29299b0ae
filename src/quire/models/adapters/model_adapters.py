"""All that adapters change in a model, and the slots that hold the adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.kernels.adapter_slots import AdapterBatch
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.adapters.image import AdapterImage
from quire.layers.adapters.matrix import AdaptedMatrix
from quire.layers.adapters.vocabulary import AdaptedVocabulary
from quire.layers.embedding import Vocabulary
from quire.layers.linear import ColumnLinear, Linear
from quire.layers.up_projection import UpProjection
from quire.models.adapters.adapter import EMBEDDING, HEAD, Adapter
from quire.models.causal_lm import CausalLM


class ModelAdapters:
    """Slots beside the matrices of a model, which is loaded.

    The one that makes K and V from latents is multiplied in three ways, so it has no slots.
    """

    def __init__(
        self, model: CausalLM, count: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count, self.rank, self.device = count, rank, device
        self.active = ActiveAdapters()
        self.matrices: dict[str, AdaptedMatrix] = {}
        # A head that shares the embedding's matrix is found under both names.
        found = dict(model.named_modules(remove_duplicate=False))
        self.embedding = self._of_vocabulary(found[EMBEDDING])
        self.head = self._of_vocabulary(found[HEAD])
        for path, layer in found.items():
            if isinstance(layer, Linear) and not isinstance(layer, Vocabulary | UpProjection):
                adapted = AdaptedMatrix(layer.matrix, _output_sizes(layer), self.active)
                layer.matrix = self.matrices[path] = adapted
        widths = [matrix.table_width for matrix in self.matrices.values()]
        # What each slot of each matrix holds: one tensor, so that one copy says it.
        self._table = torch.zeros(count, sum(widths), dtype=torch.int32, device=device)
        tables = self._table.split(widths, dim=1)
        for matrix, table in zip(self.matrices.values(), tables, strict=True):
            matrix.make_slots(rank, dtype, table)
        model.freeze()

    def _of_vocabulary(self, layer: torch.nn.Module) -> AdaptedVocabulary:
        assert isinstance(layer, Vocabulary)
        if not isinstance(layer.matrix, AdaptedVocabulary):
            layer.matrix = AdaptedVocabulary(layer.matrix, self.active)
        return layer.matrix

    @property
    def num_bytes(self) -> int:
        """What the slots take."""
        return sum(matrix.slot_bytes for matrix in self.matrices.values())

    def image(self, adapter: Adapter) -> AdapterImage:
        """An adapter as a slot will hold it."""
        layers = dict(adapter.layers)
        (of_head,) = layers.pop(HEAD, (None,))
        replaced = adapter.replaced
        return AdapterImage(
            {path: self.matrices[path].image(outputs) for path, outputs in layers.items()},
            self.embedding.image_of_rows(adapter.embedding, replaced.get(EMBEDDING)),
            self.head.image_of_head(of_head, replaced.get(HEAD)),
        )

    def store(self, slot: int, image: AdapterImage) -> None:
        """Put an adapter into a slot in place of another, on the device's current stream."""
        table: list[int] = []
        for path, matrix in self.matrices.items():
            table += matrix.store(slot, image.matrices.get(path))
        row = torch.tensor(table, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._table[slot].copy_(row, non_blocking=True)
        self.embedding.of_rows.store(slot, image.embedding, self.device)
        self.head.of_head.store(slot, image.head, self.device)

    @contextmanager
    def over(self, batch: AdapterBatch | None) -> Iterator[None]:
        """Around a pass whose rows have these adapters."""
        self.active.batch = batch
        try:
            yield
        finally:
            self.active.batch = None


def _output_sizes(layer: Linear) -> list[int]:
    """The features of each output that this rank computes."""
    return layer.sizes if isinstance(layer, ColumnLinear) else [layer.matrix.out_features]
