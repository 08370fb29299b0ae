"""How a step's KV is split over threads (split-KV); worked out once a step.

Each row of q is split over the tokens it sees. That reads a sequence's K and V once for each
of its rows, which is what decoding must do and what short prompts can afford. Rows of long prompts
are attended a tile of them at a time: by `prompt_attention.py` or by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.numba.sizes import SPLIT
from quire.kernels.pages import LayerPages

# With more rows than this, seeing more tokens each than that, torch is faster. Measured on two
# Neoverse-N1 cores in float32: level at prompts of 220 tokens, 12 times slower at 8.
FEW_ROWS = 16
FEW_TOKENS = 128


@dataclass(frozen=True)
class KVSplits:
    count: int
    fields: Tensor  # int32: as the kernel's arguments say
    finished: Tensor  # int64 [splits]: zeros
    results: Tensor  # float32, for the kernel: what each split amounts to
    scratch: Tensor  # float32, for the kernel: room for each thread
    tokens: int  # that all rows see, together
    long: list[int]  # the sequences with long prompts, which have no splits
    covers_all: bool  # every row of q has a split

    def renew(self, batch: AttentionBatch, window: int | None) -> bool:
        """Have the splits of a step alike in the same memory, if there is room; whether it is."""
        listed = _list_splits(batch, window)
        if (
            len(listed.fields) > len(self.fields)
            or listed.long
            or listed.rows < len(batch.slot_mapping)
        ):
            return False
        self.fields[: len(listed.fields)] = torch.tensor(listed.fields, dtype=torch.int32)
        return True


@dataclass
class _Listed:
    fields: list[int] = field(default_factory=lambda: [0])  # the first is how many splits there are
    long: list[int] = field(default_factory=list)  # sequences with long prompts
    rows: int = 0  # of q that have splits
    tokens: int = 0


def plan_splits(
    batch: AttentionBatch,
    pages: LayerPages,
    window: int | None,
    heads: int,
    threads: int,
    room: int = 0,
) -> KVSplits:
    """`room`: tokens of a sequence for which `renew` shall have some."""
    listed = _list_splits(batch, window)
    count = listed.fields[0]
    most = max(count, len(batch.query_lens) * (-(-room // SPLIT) + 1))  # windows begin anywhere
    fields = torch.zeros(1 + 6 * most, dtype=torch.int32)
    fields[: len(listed.fields)] = torch.tensor(listed.fields, dtype=torch.int32)
    return KVSplits(
        count=count,
        fields=fields,
        finished=torch.zeros(most, dtype=torch.int64),
        results=torch.empty(most * heads * (pages.v_width + 2)),
        scratch=torch.empty(threads * heads * (pages.k_width + SPLIT)),
        tokens=listed.tokens,
        long=listed.long,
        covers_all=listed.rows == len(batch.slot_mapping),
    )


def _list_splits(batch: AttentionBatch, window: int | None) -> _Listed:
    starts = batch.query_starts.tolist()
    listed = _Listed()
    fields = listed.fields
    for s, (query_len, context) in enumerate(zip(batch.query_lens, batch.contexts, strict=True)):
        if _is_long(query_len, context, window):
            listed.long.append(s)
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
            first, count = fields[0], len(bounds) - 1
            for i in range(count):
                fields += (row, s, *bounds[i : i + 2], first, count)
            fields[0] += count
            listed.rows += 1
            listed.tokens += end - begin
    return listed


def _is_long(query_len: int, context: int, window: int | None) -> bool:
    seen = context - query_len / 2  # by a row, on average
    if window is not None:
        seen = min(seen, window)
    return query_len > FEW_ROWS and seen > FEW_TOKENS
