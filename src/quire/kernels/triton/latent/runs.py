"""Latent attention of sequences with several new tokens, each with all it sees: no splits.

A run is a few consecutive new tokens of a sequence, so many that with all heads they are the rows
of one program. It is listed like a split that is alone (`attention/kv_splits.py`), and the same
kernels compute it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.triton.attention.kv_splits import FIELDS, KVSplits
from quire.kernels.triton.latent.choice import shape_of


def list_runs(batch: AttentionBatch, q: Tensor, pages: LatentPages, above: int) -> KVSplits:
    """The runs of all sequences with more new tokens than `above`; the same for all layers."""
    tokens, heads, _ = q.shape
    together = max(1, shape_of(q, pages, tokens).rows // heads)
    sequences = len(batch.query_lens)
    count = tokens // together + sequences
    nothing = q.new_empty(0, dtype=torch.float32)
    table = q.new_empty(count, FIELDS.value, dtype=torch.int32)
    _list_runs[(count,)](
        batch.query_starts, batch.context_lens, table, sequences, above, TOGETHER=together
    )
    return KVSplits(count, together, table, nothing, nothing, nothing)


@triton.jit(do_not_specialize=["sequences", "above"])
def _list_runs(query_starts, context_lens, table, sequences, above, TOGETHER: tl.constexpr):
    """Sequence s has the runs from `query_starts[s] // TOGETHER + s` on, which are enough."""
    run = tl.program_id(0)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOGETHER + middle <= run:
            low = middle
        else:
            high = middle
    row = tl.load(query_starts + low)
    length = tl.load(query_starts + low + 1) - row
    context = tl.load(context_lens + low)
    first = (run - row // TOGETHER - low) * TOGETHER
    tokens = tl.minimum(length - first, TOGETHER)
    start = context - length + first
    live = (length > above) & (tokens > 0)
    field = table + run * FIELDS
    tl.store(field, tl.where(live, low, -1))
    tl.store(field + 1, row + first)
    tl.store(field + 2, 0)
    tl.store(field + 3, start + tokens)
    tl.store(field + 4, 1)
    tl.store(field + 5, tokens)
    tl.store(field + 6, start)
