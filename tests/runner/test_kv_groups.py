"""A model whose windows give their blocks back computes what it does with one table of all."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import CpuBackend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv_groups import KVGroup
from quire.layers.attention import Step
from quire.models.causal_lm import CausalLM
from quire.models.config import ModelConfig
from quire.models.hf_config import read_hf_config
from quire.models.pool_groups import pool_groups
from quire.models.source import empty_model
from quire.params import SamplingParams
from quire.runner.graphs import Computed, StepGraphs
from quire.runner.inputs import NO_SLOT
from quire.runner.plan import GroupTables, StepPlan
from quire.runner.runner import ModelRunner
from quire.runner.sampling.sampler import SampleRow

SIZE = 4  # of a block
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
# Windows of the layers, and how many tables a sequence then has.
WINDOWS: dict[str, tuple[tuple[int | None, ...], int]] = {
    "qwen2, two groups": ((None, 7, None, 7, None), 2),
    "qwen2, unlike windows": ((None, 7, 3, 7, None), 3),
    "qwen2, one full layer": ((9, 9, None, 9, 9), 5),
    "mistral, windows alone": ((6, 6, 6, 6, 6), 1),
    "mistral, of one token": ((1, 1, 1, 1, 1), 1),
}
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU (graphs are tested there)",
)
compiled = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs Numba")
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(params=["cpu", pytest.param("numba", marks=compiled)])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "numba":
        from quire.kernels.numba import NumbaBackend

        return NumbaBackend()
    return CpuBackend()


def config_of(name: str) -> ModelConfig:
    architecture = f"{name.split(',')[0].capitalize()}ForCausalLM"
    config = read_hf_config({**SHAPE, "architectures": [architecture]})
    return replace(config, windows=WINDOWS[name][0])


def model_of(config: ModelConfig) -> CausalLM:
    torch.manual_seed(0)
    model = empty_model(config, torch.float32, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.25)
    return model


@dataclass
class Table:
    """A sequence's blocks in one group, and the KV that it still needs."""

    group: KVGroup
    ids: list[int] = field(default_factory=list)
    first: int = 0


class Paged:
    """A runner and the tables of its sequences; blocks that were given back hold NaN."""

    def __init__(self, model: CausalLM, groups: tuple[KVGroup, ...], backend: Backend) -> None:
        layout = KVLayout(groups, SIZE, torch.float32)
        self.cache = PagedKVCache(layout, 160, torch.device("cpu"), backend)
        self.cache.images.fill_(0xFF)
        self.runner = ModelRunner(model, self.cache)
        self.free = random.Random(1).sample(range(160), 160)
        self.tables: dict[str, list[Table]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, work: dict[str, list[int]]) -> tuple[Tensor, list[int]]:
        """The hidden states of all new tokens, and what is drawn behind each sequence's last."""
        plan = self._plan(work)
        with torch.inference_mode():
            hidden = self.runner._forward(plan).hidden.clone()
        drawn = self.runner.launch(plan).result().token_ids
        for name, ids in work.items():
            self.lengths[name] += len(ids)
            for table in self.tables[name]:
                self._give_back(table, self.lengths[name])
        return hidden, drawn

    def _plan(self, work: dict[str, list[int]]) -> StepPlan:
        groups = self.cache.layout.groups
        for name, ids in work.items():
            self.lengths.setdefault(name, 0)
            for table in self.tables.setdefault(name, [Table(group) for group in groups]):
                end = -(-(self.lengths[name] + len(ids)) // SIZE)
                while table.first + len(table.ids) < end:
                    table.ids.append(self.free.pop())
        by_group = zip(*(self.tables[name] for name in work), strict=True)
        counts = np.array([len(ids) for ids in work.values()], dtype=np.int32)
        return StepPlan(
            token_ids=np.concatenate(list(work.values())).astype(np.int32),
            starts=np.array([self.lengths[name] for name in work], dtype=np.int32),
            counts=counts,
            tables=tuple(
                GroupTables.of(
                    [np.array(table.ids, dtype=np.int32) for table in group],
                    [table.first for table in group],
                )
                for group in by_group
            ),
            samples=[SampleRow(GREEDY, seed=0, position=0) for _ in work],
            sample_rows=np.cumsum(counts, dtype=np.int32) - 1,
        )

    def _give_back(self, table: Table, length: int) -> None:
        if table.group.window is None:
            return
        while (table.first + 1) * SIZE <= length - table.group.window + 1:
            block = table.ids.pop(0)
            self.cache.images[block] = 0xFF
            self.free.insert(0, block)
            table.first += 1


@pytest.mark.diagonal
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("chunk", [64, 5, 1])
def test_groups_compute_what_one_full_group_does(name: str, chunk: int, backend: Backend) -> None:
    """Prompts at once, in chunks and beside decodes, over several windows."""
    config = config_of(name)
    model = model_of(config)
    groups = pool_groups(config, window_groups=True)
    assert len(groups) == WINDOWS[name][1]
    one = pool_groups(config, window_groups=False)
    assert len(one) == 1 and one[0].window is None
    whole, parts = Paged(model, one, backend), Paged(model, groups, backend)
    dice = random.Random(2)
    prompts = {
        "long": [dice.randrange(131) for _ in range(41)],
        "short": [dice.randrange(131) for _ in range(6)],
    }
    late = [dice.randrange(131) for _ in range(18)]
    last: dict[str, int] = {}
    for number in range(60 // min(chunk, 6)):
        if number == 3:
            prompts["late"] = late
        work = {}
        for sequence, left in prompts.items():
            work[sequence] = left[:chunk] if left else [last[sequence]]
            prompts[sequence] = left[chunk:]
        (wanted, drawn), (got, also_drawn) = whole.step(work), parts.step(work)
        assert not wanted.isnan().any()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert also_drawn == drawn
        last = dict(zip(work, drawn, strict=True))
    windowed = [t for t in parts.tables["long"] if t.group.window is not None]
    assert all(table.first > 0 for table in windowed)
    step_tokens = min(chunk, 41)
    for number, table in enumerate(parts.tables["long"]):
        layout = parts.cache.layout
        most = layout.most_table_blocks(number, whole.lengths["long"], step_tokens)
        assert len(table.ids) <= most


@interpreted
@pytest.mark.parametrize("name", WINDOWS)
def test_a_step_laid_out_for_a_graph_reads_every_group(name: str) -> None:
    """With spare tokens, spare sequences, and rests of wider steps behind narrow tables."""
    config = config_of(name)
    model = model_of(config)
    groups = pool_groups(config, window_groups=True)
    eager, recorded = Paged(model, groups, CpuBackend()), Paged(model, groups, CpuBackend())
    graphs = StepGraphs(OfUsedRows(model), recorded.cache, 5, 16, max_model_len=64)
    recorded.runner._forward = partial(replayed, graphs)
    dice = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(131) for _ in range(count)]

    for work in (
        {"a": tokens(16)},
        {"b": tokens(3), "a": tokens(9)},
        {"a": tokens(1), "b": tokens(1), "c": tokens(1)},
        {"b": tokens(14)},
        {"d": tokens(1), "c": tokens(5), "a": tokens(1)},
        {"c": tokens(1), "a": tokens(1), "b": tokens(1), "d": tokens(1)},
    ):
        (wanted, drawn), (got, also_drawn) = eager.step(work), recorded.step(work)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert also_drawn == drawn
    windowed = [table for table in recorded.tables["a"] if table.group.window is not None]
    assert all(table.first > 0 for table in windowed)


class OfUsedRows:
    """A model that reads a step's lengths where a GPU's kernels do, and leaves out spare rows."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def __call__(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        used = int(step.batches[0].query_starts[-1])
        batches = []
        for batch in step.batches:
            assert batch.slot_mapping[used:].eq(NO_SLOT).all()
            lengths = batch.context_lens.tolist()
            assert max(lengths) <= max(batch.contexts) == min(batch.contexts)
            count = sum(length > 0 for length in lengths)  # spare sequences come last
            assert not any(lengths[count:])
            batches.append(
                AttentionBatch(
                    batch.slot_mapping[:used],
                    batch.block_tables[:count],
                    batch.query_starts[: count + 1],
                    batch.context_lens[:count],
                    query_lens=batch.query_starts.diff().tolist()[:count],
                    contexts=lengths[:count],
                )
            )
        exact = Step(tuple(batches), step.pages, step.backend, step.num_positions)
        hidden: Tensor = self.model(token_ids[:used], positions[:used], exact)
        return hidden


def replayed(graphs: StepGraphs, plan: StepPlan) -> Computed:
    shape = graphs.shape_for(plan)
    assert shape is not None
    graphs._load(shape, plan, torch.zeros(1, dtype=torch.int64))
    return Computed(graphs.forward(shape))


def test_a_table_wider_than_a_graph_has_room_for_is_not_replayed() -> None:
    """Steps of more tokens than were said at the start could leave such tables."""
    config = config_of("mistral, windows alone")
    paged = Paged(model_of(config), pool_groups(config, window_groups=True), CpuBackend())
    graphs = StepGraphs(paged.runner.model, paged.cache, 2, 2, max_model_len=200)
    room = paged.cache.layout.most_table_blocks(0, 200, 2)
    for width in (room, room + 1):
        tables = (GroupTables(np.zeros((1, width), dtype=np.int32)),)
        plan = replace(paged._plan({"a": [1]}), tables=tables)
        assert (graphs.shape_for(plan) is not None) == (width == room)


def test_every_layer_reads_the_tables_of_its_group() -> None:
    config = config_of("qwen2, unlike windows")
    groups = pool_groups(config, window_groups=True)
    cache = Paged(model_of(config), groups, CpuBackend()).cache
    for layer, pages in enumerate(cache.layers):
        assert layer in groups[pages.group].layers
        assert groups[pages.group].window == config.windows[layer]
