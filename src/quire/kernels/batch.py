"""What a kernel must know about a step: which tokens are new, and where their KV lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class BatchPlan:
    """Where a backend keeps what it has worked out about a batch; `Backend.begin` fills it."""

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: Any = None


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The new tokens of several sequences, laid end to end, and each sequence's pages.

    Sequence `s` owns rows `query_starts[s]:query_starts[s + 1]`. Its last row stands at position
    `contexts[s] - 1`, and every row attends to the positions up to its own.
    """

    slot_mapping: Tensor  # int64 [tokens]: the slot each new token's KV is written to; < 0: none
    block_tables: Tensor  # int32 [sequences, width]: rows are padded with 0, which is never read
    query_starts: Tensor  # int32 [sequences + 1]
    context_lens: Tensor  # int32 [sequences]: tokens of KV once this step's are written
    query_lens: list[
        int
    ]  # the last two again, on the host, so that no read of them has to synchronise
    contexts: list[int]
    plan: BatchPlan = field(init=False, repr=False, default_factory=BatchPlan)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @property
    def max_context_len(self) -> int:
        return max(self.contexts, default=0)
