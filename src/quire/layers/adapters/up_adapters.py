"""Adapters of the matrix that makes each head's K and V from a latent (`up_projection.py`).

A head's part of it becomes `W + B A`, of which A is the same for all heads. Where it is absorbed,
the two small matrices are multiplied in another order, or are transposed:

    absorb    q's nope features · B of K ─ · A                        q in the space of latents
    values    sums of latents · A, transposed ─ · B of V, transposed  what V's own sums would be

So a row is a pair of a token and a head, and a slot has two small matrices for each head, as it has
for each expert elsewhere. A bias of K changes nothing: it adds the same to all scores of a query.
That of V is added once, as the weights of a query's tokens add up to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, Ints, SortedRows
from quire.kernels.adapters import add_adapters
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.batch_parts import BatchPart
from quire.layers.low_rank import LowRank


class UpAdapters:
    """`absorbing` is from q to latents, `values` from latents to V; both have one for each head."""

    def __init__(self, absorbing: MatrixAdapters, values: MatrixAdapters) -> None:
        self.absorbing, self.values = absorbing, values
        self.nope = absorbing.in_features

    @property
    def heads(self) -> int:
        assert self.values.experts is not None
        return self.values.experts

    @property
    def _batch(self) -> AdapterBatch | None:
        return self.values.active.batch

    def split(self, whole: LowRank) -> tuple[LowRank, LowRank]:
        """What is added to the matrix, as it is absorbed and as it makes values."""
        of_k, of_v = whole.b.unflatten(0, (self.heads, -1)).tensor_split([self.nope], dim=1)
        a = whole.a.expand(self.heads, -1, -1)
        bias = None
        if whole.bias is not None:
            bias = whole.bias.unflatten(0, (self.heads, -1))[:, self.nope :]
        return LowRank(of_k.transpose(1, 2), a.transpose(1, 2)), LowRank(a, of_v, bias)

    def add_absorbed(self, q: Tensor, out: Tensor, part: BatchPart | None) -> None:
        """To `out` `[rows, heads, rank]`, from `q` `[rows, heads, nope]`, both those of a part."""
        _add(q, self.absorbing, self._pairs(part), out)

    def add_values(self, sums: Tensor, out: Tensor, part: BatchPart | None) -> None:
        """To `out` `[rows, heads, values]`, from sums of latents `[rows, heads, rank]`."""
        _add(sums, self.values, self._pairs(part), out)

    def add_expanded(self, latents: Tensor, out: Tensor, heads: range, part: BatchPart) -> None:
        """To K and V of some heads `[tokens, heads, nope + values]`, from the latents of all tokens
        that the sequences of a part have."""
        absorbing, values = self.absorbing.slots, self.values.slots
        for slot, tokens in self._sequences(part):
            [rank] = values.ranks[slot]
            own = slice(slot * self.heads + heads.start, slot * self.heads + heads.stop)
            if rank:
                hidden = latents[tokens] @ values.a[slot * self.heads, :rank].T
                both = torch.cat((absorbing.a[own, :rank], values.b[own, :rank]), dim=2)
                out[tokens] += (hidden @ both).transpose(0, 1)
            if values.biased[slot]:
                out[tokens, :, self.nope :] += values.bias[own]

    def _sequences(self, part: BatchPart) -> Iterator[tuple[int, slice]]:
        """The slots of those that have an adapter, and where their tokens are among all."""
        if self._batch is None:
            return
        slots = _host_slots(self._batch, part)
        first_rows = accumulate(part.batch.query_lens, initial=0)
        spans = pairwise(accumulate(part.batch.contexts, initial=0))
        for row, (begin, end) in zip(first_rows, spans, strict=False):
            if slots[row] >= 0:
                yield int(slots[row]), slice(begin, end)

    def _pairs(self, part: BatchPart | None) -> AdapterBatch | None:
        """The pairs of a part's rows and heads; made by the first layer of a pass."""
        batch = self._batch
        if batch is None:
            return None
        found = batch.derived.get((part, self.heads))
        if found is None:
            rows = batch
            if part is not None and part.host_rows is not None:
                rows = SortedRows.of(_host_slots(batch, part)).on(batch.slots.device)
            found = batch.derived[part, self.heads] = rows.with_all_experts(self.heads)
        return found


def _host_slots(batch: AdapterBatch, part: BatchPart) -> Ints:
    """Those of a part's rows."""
    assert batch.host_slots is not None  # but for recorded steps, which have no parts
    return batch.host_slots if part.host_rows is None else batch.host_slots[part.host_rows]


def _add(x: Tensor, adapters: MatrixAdapters, pairs: AdapterBatch | None, out: Tensor) -> None:
    if pairs is not None:
        add_adapters(x.flatten(0, 1), adapters.slots, pairs, out.view(-1, out.shape[2]))
