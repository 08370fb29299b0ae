"""The adapters of one matrix, or of one that each of some experts has: slots, what they add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.adapter_slots import AdapterSlots, SlotRun
from quire.kernels.adapters import add_adapters
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.adapters.image import MatrixImage, Outputs, matrix_image


class Copy(NamedTuple):
    """Of numbers of one type and shape."""

    target: Tensor
    source: Tensor


def copy_all(copies: Sequence[Copy]) -> None:
    """Hundreds, which a GPU makes in a few launches if no target has gaps: those of experts whose
    rank is below the largest have, and would have all others made one by one."""
    whole = [copy for copy in copies if copy.target.is_contiguous()]
    if whole:
        targets, sources = zip(*whole, strict=True)
        torch._foreach_copy_(targets, sources)
    for copy in copies:
        if not copy.target.is_contiguous():
            copy.target.copy_(copy.source)


class MatrixAdapters:
    """`sizes` are the features of the outputs that the matrix has beside each other."""

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        active: ActiveAdapters,
        experts: int | None = None,
        has_bias: bool = True,
    ) -> None:
        """Without `has_bias` no adapter has one, and slots have no memory for it."""
        self.has_bias = has_bias
        self.in_features, self.sizes, self.experts = in_features, tuple(sizes), experts
        self.active = active
        self.slots: AdapterSlots

    @property
    def table_width(self) -> int:
        """The numbers that say what a slot holds: where each output begins and ends, and whether
        there is a bias."""
        return len(self.sizes) + 2

    def make_slots(self, rank: int, dtype: torch.dtype, table: Tensor) -> None:
        """Memory for adapters of up to this rank; `table` is int32 `[slots, table_width]`."""
        device, outputs, features = table.device, len(self.sizes), sum(self.sizes)
        count = len(table) * (self.experts or 1)
        columns = list(accumulate(self.sizes, initial=0))
        self.slots = AdapterSlots(
            a=torch.empty(count, outputs * rank, self.in_features, dtype=dtype, device=device),
            b=torch.empty(count, rank, features, dtype=dtype, device=device),
            bias=torch.empty(count, features * self.has_bias, dtype=dtype, device=device),
            starts=table[:, : outputs + 1],
            is_biased=table[:, outputs + 1],
            columns=torch.tensor(columns, dtype=torch.int32, device=device),
            sizes=self.sizes,
            ranks=[(0,) * outputs] * len(table),
            biased=[False] * len(table),
            experts=self.experts or 1,
        )

    @property
    def num_bytes(self) -> int:
        """What all slots take."""
        return self.slots.a.nbytes + self.slots.b.nbytes + self.slots.bias.nbytes

    def image(self, outputs: Outputs) -> MatrixImage:
        """What a slot will hold of an adapter."""
        experts = () if self.experts is None else (self.experts,)
        return matrix_image(outputs, self.sizes, self.in_features, self.slots.a.dtype, experts)

    def table_row(self, image: MatrixImage | None) -> list[int]:
        """How a slot holds an adapter, or none."""
        if image is None:
            return [0] * self.table_width
        return [*accumulate(image.ranks, initial=0), int(image.bias is not None)]

    def store(self, slot: int, image: MatrixImage | None) -> Iterator[Copy]:
        """Put an adapter, or none, into a slot, by these copies."""
        slots = self.slots
        if image is None:
            slots.ranks[slot], slots.biased[slot] = (0,) * len(self.sizes), False
            return
        slots.ranks[slot], slots.biased[slot] = image.ranks, image.bias is not None
        own = slice(slot * slots.experts, (slot + 1) * slots.experts)
        for whole, part in ((slots.a, image.a), (slots.b, image.b)):
            yield Copy(whole[own, : part.shape[-2]].view(part.shape), part)
        if image.bias is not None:
            yield Copy(slots.bias[own].view(image.bias.shape), image.bias)

    def have_bias(self, runs: Sequence[SlotRun]) -> bool:
        """Whether an adapter of these runs has one here."""
        return any(run.slot >= 0 and self.slots.biased[run.slot] for run in runs)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add to the matrix's product what the adapters of this pass do."""
        if self.active.batch is not None:
            add_adapters(x, self.slots, self.active.batch, out)
