"""Decode steps recorded once and replayed: hundreds of launches become one.

A graph reads and writes fixed addresses. So there is one set of input buffers, as large as the
largest step, and a graph for each of a few batch sizes over the first rows of it. A step takes the
next size up; its spare rows have no context and write nothing.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kv.pool import PagedKVCache
from quire.layers.attention import Step
from quire.models.llama import CausalLM
from quire.runner.inputs import NO_SLOT, StepInputs


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to record up to `most`, closer together where a spare row costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """The decoder over one new token of each sequence, for every batch size up to a limit."""

    def __init__(
        self, model: CausalLM, cache: PagedKVCache, max_rows: int, max_model_len: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.max_model_len = max_model_len
        self.sizes = graph_sizes(max_rows)
        device = cache.tensor.device
        columns = cache.layout.blocks_for(max_model_len)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_rows, columns), dtype=torch.int32, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._recorded: dict[int, _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def rows_for(self, sequences: int) -> int:
        """The size of the graph that serves this many; 0 if none does."""
        place = bisect_left(self.sizes, sequences)
        return self.sizes[place] if place < len(self.sizes) else 0

    @torch.inference_mode()
    def record(self, sizes: list[int] | None = None) -> None:
        """Record graphs, largest first: the smaller ones then fit into its memory."""
        device = self._token_ids.device
        self.model.reserve(self.max_model_len, device)
        stream = torch.cuda.Stream(device)
        gc.collect()
        with torch.cuda.stream(stream):
            for rows in sorted(sizes or self.sizes, reverse=True):
                self._forward(rows)  # compiles what is not compiled yet, which a graph cannot
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                    hidden = self._forward(rows)
                self._recorded[rows] = _Recorded(graph, hidden)
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, inputs: StepInputs) -> Tensor:
        """The hidden states `[rows, hidden]` of inputs that are padded to a graph's size.

        They are valid until the next replay.
        """
        rows, batch = len(inputs.token_ids), inputs.batch
        columns = batch.block_tables.shape[1]
        self._token_ids[:rows].copy_(inputs.token_ids)
        self._positions[:rows].copy_(inputs.positions)
        self._slots[:rows].copy_(batch.slot_mapping)
        self._contexts[:rows].copy_(batch.context_lens)
        self._tables[:rows, :columns].copy_(batch.block_tables)
        recorded = self._recorded[rows]
        recorded.graph.replay()
        return recorded.hidden

    def _forward(self, rows: int) -> Tensor:
        batch = AttentionBatch(
            self._slots[:rows],
            self._tables[:rows],
            self._starts[: rows + 1],
            self._contexts[:rows],
            query_lens=[1] * rows,
            contexts=[self.max_model_len] * rows,
        )
        step = Step(batch, self.cache.tensor, self.cache.backend)
        hidden: Tensor = self.model(self._token_ids[:rows], self._positions[:rows], step)
        return hidden
