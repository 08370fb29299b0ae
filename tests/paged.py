"""Drives a model, or a backend alone, over a paged cache: what tests of several rooms share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv_groups import without_windows
from quire.layers.attention import Step
from quire.layers.weights import FLOATS
from quire.models.causal_lm import CausalLM


def attention_batch(
    tables: Sequence[Sequence[int]],
    cached: Sequence[int],
    new: Sequence[int],
    block_size: int,
    device: str = "cpu",
) -> AttentionBatch:
    """Each sequence has a list of blocks, `cached` tokens in them, and `new` ones to come."""
    contexts = [before + more for before, more in zip(cached, new, strict=True)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, before, context in zip(tables, cached, contexts, strict=True)
        for position in range(before, context)
    ]
    width = max(map(len, tables), default=0)
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return AttentionBatch(
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_lens=list(new),
        contexts=contexts,
    )


class PagedModel:
    """A model and a pool whose blocks are handed out in a random order, and hold NaN at first."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        block_size: int = 4,
        num_blocks: int = 64,
    ) -> None:
        weight = next(each for each in model.parameters() if each.dtype in FLOATS)
        self.model, self.backend, self.block_size = model, backend, block_size
        self.device = str(weight.device)
        groups = without_windows(model.kv_groups(model.tp))
        layout = KVLayout(groups, block_size, weight.dtype)
        cache = PagedKVCache(layout, num_blocks, weight.device, backend)
        cache.images.view(weight.dtype).fill_(torch.nan)
        self.pages = cache.layers
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, work: dict[str, list[int]]) -> dict[str, Tensor]:
        """Compute each sequence's next tokens; the logits `[tokens, vocab]` of all of them."""
        cached = [self.lengths.get(name, 0) for name in work]
        new = [len(ids) for ids in work.values()]
        for name, ids in work.items():
            self._grow(name, len(ids))
        tables = [self.tables[name] for name in work]
        batch = attention_batch(tables, cached, new, self.block_size, self.device)
        ids = [token for tokens in work.values() for token in tokens]
        positions = [
            position
            for before, more in zip(cached, new, strict=True)
            for position in range(before, before + more)
        ]
        hidden = self.model(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            Step((batch,), self.pages, self.backend),
        )
        logits = self.model.logits(hidden).float()
        return dict(zip(work, logits.split(new), strict=True))

    def _grow(self, name: str, count: int) -> None:
        table = self.tables.setdefault(name, [])
        self.lengths[name] = self.lengths.get(name, 0) + count
        while len(table) * self.block_size < self.lengths[name]:
            table.append(self.free.pop())
