"""Steps recorded once and replayed: hundreds of launches become one.

A graph reads and writes fixed addresses. So there is one set of input buffers, as large as the
largest recorded step, and a graph for each of a few shapes over the beginnings of them:

    decodes      one new token for each of n sequences, for many n
    small steps  prompts, or their last tokens, among decodes: up to some tokens and sequences

With adapters each shape has two: one for steps in which no row has an adapter.

A step takes the next shape up. Its spare sequences have no token, and its spare tokens belong to
none and write nothing. What is in a step, the kernels read on the device.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kv.pool import PagedKVCache
from quire.layers.attention import Step
from quire.models.adapters.model_adapters import ModelAdapters
from quire.models.causal_lm import CausalLM
from quire.runner.adapters import RecordedRows, row_slots
from quire.runner.inputs import pack, packed_size
from quire.runner.plan import StepPlan, empty_plan
from quire.runner.transfer import read_by_kernels

SMALL_STEPS = (16, 32, 64, 128, 256, 384, 512)  # tokens; above, a GPU is busy longer than the host
MOST_SEQUENCES = 64  # of a small step
MOST_WITH_HEAD = 8  # decodes whose logits are recorded, too: of more, these take much memory


class GraphShape(NamedTuple):
    tokens: int
    sequences: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.sequences

    @property
    def query_lens(self) -> list[int]:
        """Lengths that add up, for what the host decides: which kernels, and how many programs.

        A small step may have sequences with few new tokens and with many, so these have both.
        """
        if self.is_decode or self.sequences == 1:
            return [self.tokens // self.sequences] * self.sequences
        return [0] * (self.sequences - 2) + [2, self.tokens - 2]


def graph_sizes(most: int) -> list[int]:
    """Numbers of decodes to record up to `most`, closer together where a spare row costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def graph_shapes(max_sequences: int, max_tokens: int) -> list[GraphShape]:
    """All shapes to record, each kind from small to large."""
    decodes = [GraphShape(size, size) for size in graph_sizes(min(max_sequences, max_tokens))]
    sequences = min(MOST_SEQUENCES, max_sequences)
    small = [
        GraphShape(size, min(sequences, size // 2)) for size in SMALL_STEPS if size <= max_tokens
    ]
    return decodes + small


class Computed(NamedTuple):
    """What a step's layers have computed; of a recorded step it is valid until the next replay."""

    hidden: Tensor
    logits: Tensor | None = None  # of all rows, of a few decodes


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    computed: Computed


class StepGraphs:
    """The decoder over one step, for every shape up to a limit."""

    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        max_sequences: int,
        max_tokens: int,
        max_model_len: int,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.max_model_len = max_model_len
        self.shapes = graph_shapes(max_sequences, max_tokens)
        device, layout = cache.images.device, cache.layout
        groups = range(len(layout.groups))
        self._columns = [layout.most_table_blocks(g, max_model_len, max_tokens) for g in groups]
        tokens = max(shape.tokens for shape in self.shapes)
        sequences = max(shape.sequences for shape in self.shapes)
        # A step comes in one piece, and is laid out here: token ids, positions and each group's
        # slots; and what is per sequence.
        self._tokens = torch.zeros((2 + len(groups), tokens), dtype=torch.int64, device=device)
        sizes = [_aligned(sequences * columns) for columns in self._columns]
        begins = [sum(sizes[:group]) for group in groups]
        self._all_tables = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._tables = [
            self._all_tables[begin : begin + sequences * columns].view(sequences, columns)
            for begin, columns in zip(begins, self._columns, strict=True)
        ]
        places = list(zip(begins, self._columns, strict=True))
        self._table_places = torch.tensor(places, dtype=torch.int64, device=device)
        self._starts = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        contexts = (len(groups), _aligned(sequences))
        self._contexts = torch.zeros(contexts, dtype=torch.int32, device=device)
        self._adapter_rows = None if adapters is None else RecordedRows(adapters, tokens)
        self._recorded: dict[tuple[GraphShape, bool], _Recorded] = {}  # the latter with adapters
        self._memory: Any = None  # that the graphs share, once there are any

    def shape_for(self, plan: StepPlan) -> GraphShape | None:
        """The smallest shape that holds the step."""
        tokens, sequences = plan.num_tokens, len(plan.counts)
        for tables, columns in zip(plan.tables, self._columns, strict=True):
            if tables.block_tables.shape[1] > columns:
                return None
        for shape in self.shapes:
            fits = shape.tokens >= tokens and shape.sequences >= sequences
            if fits and shape.is_decode == plan.is_decode:
                return shape
        return None

    @torch.inference_mode()
    def record(self, shapes: list[GraphShape] | None = None) -> None:
        """Record graphs, largest first: the smaller ones then fit into its memory."""
        device = self._tokens.device
        self.model.reserve(self.max_model_len, device)
        stream = torch.cuda.Stream(device)
        # Of a group of ranks, a thread looks after what it has sent, which must not end a capture.
        strictness = "global" if self.model.tp.group is None else "thread_local"
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        kinds = [False] if self._adapter_rows is None else [False, True]
        gc.collect()
        nothing = self._tokens[0, :0]  # was drawn
        with torch.cuda.stream(stream):
            for shape, adapted in product(sorted(shapes or self.shapes, reverse=True), kinds):
                self._load(shape, empty_plan(len(self._columns)), nothing, adapted)
                # This compiles what is not compiled yet, which a graph cannot.
                self._step(shape, adapted)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=stream, capture_error_mode=strictness
                ):
                    computed = self._step(shape, adapted)
                self._recorded[shape, adapted] = _Recorded(graph, computed)
        torch.cuda.current_stream().wait_stream(stream)

    def replay(
        self, shape: GraphShape, plan: StepPlan, drawn: Tensor, instead: Backend | None = None
    ) -> Computed:
        """A step that fits the shape.

        `drawn` are the tokens of the step before, if the plan is fed by it. With a backend to use
        `instead`, what the graph has recorded is launched piece by piece, to be looked into.
        """
        adapted = len(plan.adapter_slots) > 0
        self._load(shape, plan, drawn, adapted)
        if instead is not None:
            return Computed(self.forward(shape, instead, adapted))
        recorded = self._recorded[shape, adapted]
        recorded.graph.replay()
        return recorded.computed

    def _load(
        self, shape: GraphShape, plan: StepPlan, drawn: Tensor, adapted: bool = False
    ) -> None:
        """Lay the step out where its graph reads it."""
        from quire.kernels.triton.unpack import unpack

        columns = [tables.block_tables.shape[1] for tables in plan.tables]
        tokens, starts, contexts = self._places(shape)
        with read_by_kernels(packed_size(*shape, columns), tokens.device) as packed:
            pack(plan, self.cache.layout.block_size, *shape, packed.numpy())
            places = self._table_places
            unpack(packed, drawn, tokens, self._all_tables, places, starts, contexts)
        if adapted:
            assert self._adapter_rows is not None
            self._adapter_rows.load(shape.tokens, row_slots(plan))

    def _step(self, shape: GraphShape, adapted: bool) -> Computed:
        """What a graph records. With the head in it, that starts before the last norm has ended."""
        hidden = self.forward(shape, adapted=adapted)
        few = shape.is_decode and shape.sequences <= MOST_WITH_HEAD
        if few and not adapted and self.model.tp.size == 1:
            return Computed(hidden, self.model.logits(hidden))
        return Computed(hidden)

    def forward(
        self, shape: GraphShape, backend: Backend | None = None, adapted: bool = False
    ) -> Tensor:
        """The hidden states of the step that was loaded."""
        tokens, starts, contexts = self._places(shape)
        token_ids, positions, *slots = tokens
        batches = tuple(
            AttentionBatch(
                slots[group],
                tables[: shape.sequences],
                starts,
                contexts[group],
                query_lens=shape.query_lens,
                contexts=[self._longest(group)] * shape.sequences,
            )
            for group, tables in enumerate(self._tables)
        )
        backend = self.cache.backend if backend is None else backend
        step = Step(batches, self.cache.layers, backend, self.max_model_len)
        rows = self._adapter_rows if adapted else None
        with nullcontext() if rows is None else rows.over(shape.tokens):
            hidden: Tensor = self.model(token_ids, positions, step)
        return hidden

    def _places(self, shape: GraphShape) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and slots; query starts; and contexts of each group."""
        return (
            self._tokens[:, : shape.tokens],
            self._starts[: shape.sequences + 1],
            self._contexts[:, : shape.sequences],
        )

    def _longest(self, group: int) -> int:
        """The most tokens that a table of this group describes."""
        return min(self.max_model_len, self._columns[group] * self.cache.layout.block_size)


def _aligned(count: int) -> int:
    """Room for so many int32, and up to the next address for which kernels are compiled."""
    return -(-count // 16) * 16
