"""How a step's KV is split over threads (split-KV); worked out once a step.

Each row of q is split over the tokens it sees. That reads a sequence's K and V once for each
of its rows, which is what decoding must do and what short prompts can afford. Rows of long prompts
are left to torch, which attends a tile of them at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu_plan import PrefillTiles, plan_prefills
from quire.kernels.pages import LayerPages

SPLIT = 128  # tokens: enough to be worth a claim, few enough for two threads to share a sequence

# With more rows than this, seeing more tokens each than that, torch is faster. Measured on two
# Neoverse-N1 cores in float32: level at prompts of 220 tokens, 12 times slower at 8.
FEW_ROWS = 16
FEW_TOKENS = 128


@dataclass(frozen=True)
class KVSplits:
    count: int
    fields: Tensor  # int32 [splits, 6]: as the kernel's arguments say
    finished: Tensor  # int64 [splits]: zeros
    results: Tensor  # float32, for the kernel: what each split amounts to
    scratch: Tensor  # float32, for the kernel: room for each thread
    tokens: int  # that all rows see, together
    prefills: list[PrefillTiles]  # the sequences that are left to torch
    covers_all: bool  # every row of q has a split


def plan_splits(
    batch: AttentionBatch,
    pages: LayerPages,
    window: int | None,
    dtype: torch.dtype,
    heads: int,
    threads: int,
) -> KVSplits:
    starts = batch.query_starts.tolist()
    fields: list[tuple[int, ...]] = []
    long: list[int] = []
    rows = tokens = 0
    for s, (query_len, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
        if _is_long(query_len, context, window):
            long.append(s)
            continue
        for end in range(max(context - query_len, 0) + 1, context + 1):
            row = starts[s] + query_len - 1 - (context - end)
            begin = 0 if window is None else max(0, end - window)
            # Where splits end does not depend on where a window begins, nor on other sequences:
            # the same tokens are summed in the same order.
            bounds = [
                begin,
                *range(begin - begin % SPLIT + SPLIT, end, SPLIT),
                end,
            ]
            first, count = len(fields), len(bounds) - 1
            fields += [(row, s, *bounds[i : i + 2], first, count) for i in range(count)]
            rows += 1
            tokens += end - begin
    return KVSplits(
        count=len(fields),
        fields=torch.tensor(fields, dtype=torch.int32),
        finished=torch.zeros(len(fields), dtype=torch.int64),
        results=torch.empty(len(fields) * heads * (pages.v_width + 2)),
        scratch=torch.empty(threads * heads * (pages.k_width + SPLIT)),
        tokens=tokens,
        prefills=plan_prefills(long, batch, pages, window, dtype),
        covers_all=rows == len(batch.slot_mapping),
    )


def _is_long(query_len: int, context: int, window: int | None) -> bool:
    seen = context - query_len / 2  # by a row, on average
    if window is not None:
        seen = min(seen, window)
    return query_len > FEW_ROWS and seen > FEW_TOKENS
