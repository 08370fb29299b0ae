"""A tiny model with slots for adapters, adapters at random, and steps whose rows have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.kernels.backend import backend_for
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.low_rank import LowRank
from quire.layers.tp import SINGLE
from quire.models.adapters.adapter import EMBEDDING, HEAD, Adapter
from quire.models.adapters.model_adapters import ModelAdapters
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.dummy import DummySource
from quire.models.hf_config import read_hf_config
from quire.models.pool_groups import pool_groups
from quire.models.source import build_model
from quire.params import SamplingParams
from quire.runner.adapters import RunnerAdapters
from quire.runner.plan import GroupTables, StepPlan
from quire.runner.runner import ModelRunner
from quire.runner.sampling.sampler import SampleRow

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def make_model(raw: dict[str, Any]) -> CausalLM:
    return build_model(DummySource(read_hf_config(raw)), torch.float32, CPU, progress=False)


def runner_of(model: CausalLM, adapters: RunnerAdapters | None = None) -> ModelRunner:
    groups = pool_groups(model.config, SINGLE, window_groups=False)
    layout = KVLayout(groups, BLOCK_SIZE, torch.float32, torch.float32)
    pool = PagedKVCache(layout, 64, CPU, backend_for(CPU))
    return ModelRunner(model, pool, adapters=adapters)


def adapted_runner(model: CausalLM, adapters: dict[str, Adapter], rank: int = 16) -> ModelRunner:
    """A runner with four slots, for which the name of an adapter is its path."""
    slots = ModelAdapters(model, 4, rank, torch.float32, CPU)
    runner = runner_of(model, RunnerAdapters(slots, adapters.__getitem__))
    for name in adapters:
        runner.read_adapter(name)
    return runner


def random_adapter(slots: ModelAdapters, seed: int, rank: int, ends: bool = False) -> Adapter:
    """It changes most outputs of most layers, some with a lower rank and some with a bias; with
    `ends`, embeddings and head, too."""
    dice = torch.Generator().manual_seed(seed)
    layers = {
        path: tuple(_maybe(dice, matrix, size, rank, _may_be_biased(path)) for size in matrix.sizes)
        for path, matrix in slots.matrices.items()
        if path.rpartition(".")[0] not in slots.ups
    }
    for path, up in slots.ups.items():
        inputs, outputs = up.values.in_features, up.heads * (up.nope + sum(up.values.sizes))
        layers[path] = (_low_rank(dice, inputs, outputs, rank, False, None),)
    embedding, replaced = None, {}
    if ends:
        vocabulary, hidden = slots.head.out_features, slots.head.in_features
        layers[HEAD] = (_low_rank(dice, hidden, vocabulary, rank, False, None),)
        embedding = _low_rank(dice, vocabulary, hidden, rank, False, None)
        replaced[HEAD] = torch.randn(vocabulary, hidden, generator=dice)
        replaced[EMBEDDING] = torch.randn(vocabulary, hidden, generator=dice)
    return Adapter(f"adapter {seed}", rank, layers, embedding, replaced)


def _may_be_biased(path: str) -> bool:
    """`peft` gives routers and experts no bias, nor do these have room for one."""
    return path.rpartition(".")[2] in ("qkv", "o_proj", "down_proj") or path.endswith("mlp.gate_up")


def _maybe(
    dice: torch.Generator, matrix: MatrixAdapters, size: int, rank: int, may_be_biased: bool
) -> LowRank | None:
    kind = int(torch.randint(0, 6, (), generator=dice))
    if kind == 0:
        return None
    rank, biased = rank if kind > 2 else 1, kind == 1 and may_be_biased
    return _low_rank(dice, matrix.in_features, size, rank, biased, matrix.experts)


def _low_rank(
    dice: torch.Generator, inputs: int, size: int, rank: int, biased: bool, experts: int | None
) -> LowRank:
    each = () if experts is None else (experts,)
    a = torch.randn(*each, rank, inputs, generator=dice) * inputs**-0.5
    b = torch.randn(*each, size, rank, generator=dice) * rank**-0.5
    return LowRank(a, b, torch.randn(size, generator=dice) if biased else None)


def plan(
    prompts: list[list[int]], starts: list[int], slots: list[int], blocks: int = 12
) -> StepPlan:
    """The next tokens of sequences, the first of which has the first blocks, …"""
    counts = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    tables = np.arange(len(prompts) * blocks, dtype=np.int32).reshape(len(prompts), blocks)
    has_any = any(slot >= 0 for slot in slots)
    return StepPlan(
        token_ids=np.concatenate(prompts).astype(np.int32),
        starts=np.array(starts, dtype=np.int32),
        counts=counts,
        tables=(GroupTables(tables),),
        samples=[SampleRow(SamplingParams(temperature=0), seed=0, position=0) for _ in prompts],
        sample_rows=np.cumsum(counts, dtype=np.int32) - 1,
        adapter_slots=np.array(slots if has_any else [], dtype=np.int32),
    )
