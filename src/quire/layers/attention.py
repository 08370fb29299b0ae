"""Attention as a model sees it: hand over qkv; positions and pages are the backend's business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages, LayerPages
from quire.kernels.plain import Rotation
from quire.kernels.scoring import Scoring
from quire.layers.batch_parts import BatchParts, split_batch
from quire.layers.norm import HeadNorm
from quire.layers.tp import TensorParallel
from quire.layers.weights import FinitePlace, Layer, Weight, parameter, span


@dataclass(frozen=True, eq=False)
class Step:
    """What a forward pass needs besides token ids and positions; a pass begins when it is made."""

    batches: tuple[AttentionBatch, ...]  # one for each KV group
    pages: tuple[LayerPages | LatentPages, ...]  # one for each layer
    backend: Backend
    num_positions: int | None = None  # of the longest sequence; None: tables begin with block 0
    _parts: dict[int, BatchParts] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for batch in self.batches:
            self.backend.begin(batch)

    @cached_property
    def is_padding(self) -> Tensor:
        """Whether each token belongs to no sequence: graphs have rows to spare."""
        return self.batches[0].slot_mapping < 0

    def parts(self, group: int, most: int) -> BatchParts:
        """A group's sequences with up to `most` new tokens, and those with more."""
        if group not in self._parts:
            found = self._parts[group] = split_batch(self.batches[group], most)
            for part in (found.few, found.many):
                if part is not None and part.batch is not self.batches[group]:
                    self.backend.begin(part.batch)
        return self._parts[group]

    @property
    def max_context_len(self) -> int:
        """How many positions the longest sequence has, whatever its tables begin with."""
        if self.num_positions is not None:
            return self.num_positions
        return max(batch.max_context_len for batch in self.batches)


class Sinks(Layer):
    """A learned score for each query head, of a key that every token sees and that has no value."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.num_heads, self.part = num_heads, tp.split(num_heads, "attention heads")
        self.scores = parameter(len(self.part))

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return torch.float32

    def weights(self, path: str) -> Iterator[Weight]:
        place = FinitePlace(self.scores, path)
        yield Weight(path, (self.num_heads,), place, (span(self.part),))


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention over the paged cache; the other fields are those of `Scoring`."""

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Sinks | None = None

    @cached_property
    def scoring(self) -> Scoring:
        """Once the sinks have their memory."""
        sinks = None if self.sinks is None else self.sinks.scores
        return Scoring(self.scale, self.window, self.softcap, sinks)

    def __call__(
        self, qkv: Tensor, norm: HeadNorm | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """`qkv` is `[tokens, features]`: the heads of q, k and v after each other, not yet turned.
        The result is `[tokens, heads, width of V]`."""
        backend, pages = step.backend, step.pages[self.layer]
        assert isinstance(pages, LayerPages)
        batch = step.batches[pages.group]
        if norm is None:
            found = backend.rotate_and_attend(qkv, rotation, pages, batch, self.scoring)
            if found is not None:
                return found
        scale = None if norm is None else norm.scale
        q = backend.rotate_and_write(qkv, scale, rotation, pages, batch)
        return backend.paged_attention(q, pages, batch, self.scoring)
