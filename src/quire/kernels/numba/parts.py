"""How the sequences of a step are cut into parts, for threads to share; made once a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu_plan import Geometry, decoding

PART = 128  # tokens: enough to be worth a claim, few enough for two threads to share a sequence


@dataclass(frozen=True)
class Parts:
    count: int
    fields: Tensor  # int32 [parts, 6]: as the kernel's arguments say
    finished: Tensor  # int64 [parts]: zeros
    results: Tensor  # float32, for the kernel: what each part amounts to
    scratch: Tensor  # float32, for the kernel: room for each thread
    tokens: int  # that are attended to
    covers_all: bool  # every row of q has a part


def plan_parts(
    batch: AttentionBatch, shape: Geometry, window: int | None, heads: int, threads: int
) -> Parts:
    starts = batch.query_starts.tolist()
    fields: list[tuple[int, ...]] = []
    sequences = decoding(batch)
    tokens = 0
    for s in sequences:
        end = batch.contexts[s]
        begin = 0 if window is None else max(0, end - window)
        tokens += end - begin
        # Where parts end does not depend on where a window begins, nor on any other sequence:
        # the same tokens are summed in the same order.
        bounds = [begin, *range(begin - begin % PART + PART, end, PART), end]
        first, count = len(fields), len(bounds) - 1
        fields += [(starts[s], s, *bounds[i : i + 2], first, count) for i in range(count)]
    return Parts(
        count=len(fields),
        fields=torch.tensor(fields, dtype=torch.int32),
        finished=torch.zeros(len(fields), dtype=torch.int64),
        results=torch.empty(len(fields) * heads * (shape.head_dim + 2)),
        scratch=torch.empty(threads * heads * (shape.head_dim + PART)),
        tokens=tokens,
        covers_all=len(sequences) == len(batch.slot_mapping),
    )
