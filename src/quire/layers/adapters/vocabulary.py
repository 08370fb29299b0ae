"""Adapters of the vocabulary's matrix: of its rows, as embeddings, and of its product, the head.

Few adapters change either, and those that do may replace the whole matrix (`modules_to_save`). So
there are no slots that wait for them: what a slot's adapter has is in memory while it is there.
Passes with a changed embedding are not recorded in graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.adapter_slots import Rows
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.low_rank import LowRank
from quire.layers.matrix import Matrix
from quire.layers.weights import Weight


@dataclass(frozen=True, eq=False)
class VocabularyAdapter:
    """What an adapter does to one end: another matrix in place of the model's, or added to it."""

    replaced: Tensor | None  # [tokens, hidden]
    added: LowRank | None

    def tensors(self) -> Iterator[Tensor]:
        if self.replaced is not None:
            yield self.replaced
        if self.added is not None:
            yield from self.added.tensors()

    def moved(self, move: Callable[[Tensor], Tensor]) -> VocabularyAdapter:
        """The same, its tensors somewhere else."""
        replaced, added = self.replaced, self.added
        if added is not None:
            bias = None if added.bias is None else move(added.bias)
            added = LowRank(move(added.a), move(added.b), bias)
        return VocabularyAdapter(None if replaced is None else move(replaced), added)

    def logits(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Those of rows with this adapter, from those without."""
        if self.replaced is not None:
            logits = F.linear(hidden, self.replaced)
        if self.added is not None:
            a, b = self.added.a, self.added.b
            logits = logits + F.linear(F.linear(hidden, a), b, self.added.bias)
        return logits

    def rows(self, indices: Tensor, rows: Tensor) -> Tensor:
        """The embeddings of these tokens, from those without this adapter."""
        if self.replaced is not None:
            rows = F.embedding(indices, self.replaced)
        if self.added is not None:
            rows = rows + F.linear(self.added.a[:, indices].T, self.added.b)
        return rows


class BySlot(dict[int, VocabularyAdapter]):
    """The adapters of one end, by slot; most slots have none."""

    def store(self, slot: int, adapter: VocabularyAdapter | None, device: torch.device) -> None:
        """Put one into a slot, or none, in place of another."""
        self.pop(slot, None)
        if adapter is not None:
            self[slot] = adapter.moved(lambda tensor: tensor.to(device, non_blocking=True))


class AdaptedVocabulary(Matrix):
    """The matrix of a `Vocabulary`, which a tied model uses for both ends."""

    def __init__(self, base: Matrix, active: ActiveAdapters) -> None:
        super().__init__()
        self.base = base
        self.out_features, self.in_features = base.out_features, base.in_features
        self.active = active
        self.of_rows, self.of_head = BySlot(), BySlot()

    def image_of_rows(
        self, added: LowRank | None, replaced: Tensor | None
    ) -> VocabularyAdapter | None:
        """What a slot will hold of an adapter that changes embeddings."""
        if added is not None:
            added = replace(added, a=self._padded(added.a.T).T)
        return self._image(added, replaced)

    def image_of_head(
        self, added: LowRank | None, replaced: Tensor | None
    ) -> VocabularyAdapter | None:
        """What a slot will hold of an adapter that changes the head."""
        if added is not None:
            bias = None if added.bias is None else self._padded(added.bias)
            added = LowRank(added.a, self._padded(added.b), bias)
        return self._image(added, replaced)

    def _image(self, added: LowRank | None, replaced: Tensor | None) -> VocabularyAdapter | None:
        if added is None and replaced is None:
            return None
        return VocabularyAdapter(None if replaced is None else self._padded(replaced), added)

    def _padded(self, rows: Tensor) -> Tensor:
        """With zeros for what a rank's part has beyond the vocabulary's end."""
        whole = rows.new_zeros(self.out_features, *rows.shape[1:])
        whole[: len(rows)] = rows
        return whole

    @property
    def format_name(self) -> str:
        return self.base.format_name

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = self.base.multiply(x, bias)
        for adapter, rows in self._groups(self.of_head):
            out[rows] = adapter.logits(x[rows], out[rows])
        return out

    def rows(self, indices: Tensor) -> Tensor:
        found = self.base.rows(indices)
        for adapter, rows in self._groups(self.of_rows):
            found[rows] = adapter.rows(indices[rows], found[rows])
        return found

    def _groups(self, adapters: BySlot) -> Iterator[tuple[VocabularyAdapter, Rows]]:
        """The adapters of this pass, and the rows of each."""
        if adapters and self.active.batch is not None:
            for slot, rows in self.active.batch.groups:
                if slot in adapters:
                    yield adapters[slot], rows

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        return self.base.weights(whole, rows)

    def pack(self) -> None:
        self.base.pack()
