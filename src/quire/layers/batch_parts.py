"""A step's sequences with few new tokens and those with many, which are attended in different ways.

batch   | few | many | few |        parts   | few | few |   | many |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch


class Slots(NamedTuple):
    """Where the tokens of all sequences lie in their pages, end to end."""

    blocks: Tensor  # int64 [tokens]
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class BatchPart:
    """Some sequences of a batch, as a batch of their own."""

    batch: AttentionBatch
    rows: Tensor | None = None  # theirs among those of the whole batch; None: all
    host_rows: list[int] | None = None  # the same on the host

    def of(self, rows: Tensor) -> Tensor:
        """Its rows of a tensor that has those of the whole batch."""
        return rows if self.rows is None else rows.index_select(0, self.rows)

    def slots(self, block_size: int) -> Slots:
        """The slots of all tokens that its sequences have by the end of this step."""
        sequence, position = self._positions
        blocks = self.batch.block_tables[sequence, position // block_size]
        return Slots(blocks.long(), position % block_size)

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        """The sequence of each of these tokens, and its position there."""
        lengths, total = self.batch.context_lens.long(), sum(self.batch.contexts)
        numbers = torch.arange(len(lengths), device=lengths.device)
        sequence = torch.repeat_interleave(numbers, lengths, output_size=total)
        starts = lengths.cumsum(0) - lengths
        return sequence, torch.arange(total, device=lengths.device) - starts[sequence]


@dataclass(frozen=True)
class BatchParts:
    few: BatchPart | None
    many: BatchPart | None


def split_batch(batch: AttentionBatch, most: int) -> BatchParts:
    """Sequences with up to `most` new tokens, and those with more; a batch of one kind is whole."""
    many = [s for s, length in enumerate(batch.query_lens) if length > most]
    if not many:
        return BatchParts(BatchPart(batch), None)
    if len(many) == len(batch.query_lens) and sum(batch.query_lens) == len(batch.slot_mapping):
        return BatchParts(None, BatchPart(batch))
    few = [s for s, length in enumerate(batch.query_lens) if length <= most]
    return BatchParts(_part(batch, few) if few else None, _part(batch, many))


def _part(batch: AttentionBatch, sequences: Sequence[int]) -> BatchPart:
    query_lens = [batch.query_lens[s] for s in sequences]
    starts = list(accumulate(batch.query_lens, initial=0))
    rows = [row for s in sequences for row in range(starts[s], starts[s + 1])]
    device = batch.slot_mapping.device
    chosen, own_rows = _to(sequences, device), _to(rows, device)
    own = AttentionBatch(
        slot_mapping=batch.slot_mapping.index_select(0, own_rows),
        block_tables=batch.block_tables.index_select(0, chosen),
        query_starts=_to(list(accumulate(query_lens, initial=0)), device).int(),
        context_lens=batch.context_lens.index_select(0, chosen),
        query_lens=query_lens,
        contexts=[batch.contexts[s] for s in sequences],
    )
    return BatchPart(own, own_rows, rows)


def _to(numbers: Sequence[int], device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    here = torch.tensor(numbers, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
