"""How many blocks the pool gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import ConfigError
from quire.hardware import cpu_pool_bytes
from quire.host_memory import free_host_memory
from quire.kernels.backend import Backend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.layers.matrix import Matrix
from quire.models.adapters.model_adapters import ModelAdapters
from quire.models.causal_lm import CausalLM
from quire.params import SamplingParams
from quire.runner.adapters import RunnerAdapters
from quire.runner.graphs import StepGraphs
from quire.runner.plan import GroupTables, StepPlan
from quire.runner.runner import ModelRunner
from quire.runner.sampling.sampler import SampleRow
from quire.runner.transfer import HostLink

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """Where the device's memory goes, in bytes."""

    total: int
    weights: int
    pool: int
    packed: int = 0  # second copies of weights, in the order that a CPU's kernels read
    adapters: int = 0  # their slots
    activations: int = 0  # the most a step takes besides
    graphs: int = 0
    others: int = 0  # the driver's own, and other processes'

    @property
    def spare(self) -> int:
        beside = self.packed + self.adapters + self.activations + self.graphs + self.others
        return max(0, self.total - self.weights - self.pool - beside)

    def __str__(self) -> str:
        """A table with a line for each part that there is."""
        parts = {
            "weights": self.weights,
            "packed copies": self.packed,
            "adapter slots": self.adapters,
            "largest step": self.activations,
            "CUDA graphs": self.graphs,
            "driver and others": self.others,
            "KV pool": self.pool,
            "left free": self.spare,
        }
        lines = [f"  {'memory':<18}{self.total / GIB:8.2f} GiB"]
        lines += [f"    {name:<16}{size / GIB:8.2f}" for name, size in parts.items() if size]
        return "\n".join(lines)


def cpu_budget(model: CausalLM, num_ranks: int = 1, adapters: int = 0) -> MemoryBudget:
    """What is there, and for the pool this rank's part of it; `adapters` is what slots take."""
    free = free_host_memory()
    weights = weight_bytes(model)  # which are not in what is free
    matrices = (module for module in model.modules() if isinstance(module, Matrix))
    packed = sum(matrix.packed_bytes for matrix in matrices)
    total = free + weights + packed + adapters
    return MemoryBudget(total, weights, cpu_pool_bytes() // num_ranks, packed, adapters)


@dataclass(frozen=True)
class LargestStep:
    """What a step may grow to."""

    tokens: int
    sequences: int
    model_len: int


def cuda_budget(
    model: CausalLM,
    layout: KVLayout,
    backend: Backend,
    device: torch.device,
    utilization: float,
    largest: LargestStep,
    with_graphs: bool,
    link: HostLink,
    adapters: RunnerAdapters | None = None,
) -> MemoryBudget:
    """What is really left of the allowed share once the largest step and graphs have been run."""
    total = torch.cuda.get_device_properties(device).total_memory
    weights = weight_bytes(model)
    cache = PagedKVCache(layout, 1, device, backend)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _largest_step(model, cache, largest, link, adapters)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    slots = None if adapters is None else adapters.slots
    graphs = _graph_bytes(model, cache, largest, slots) if with_graphs else 0
    free, _ = torch.cuda.mem_get_info(device)
    held = total - free  # by this process, its CUDA context, and its neighbours
    pool = int(total * utilization) - held - activations - graphs
    in_slots = 0 if adapters is None else adapters.num_bytes
    others = max(0, held - weights - in_slots)
    return MemoryBudget(total, weights, pool, 0, in_slots, activations, graphs, others)


def _graph_bytes(
    model: CausalLM,
    cache: PagedKVCache,
    largest: LargestStep,
    adapters: ModelAdapters | None,
) -> int:
    """What recording all graphs will take, from the largest two."""
    graphs = StepGraphs(
        model, cache, largest.sequences, largest.tokens, largest.model_len, adapters
    )
    device = cache.images.device
    taken = []
    for shape in sorted(graphs.shapes)[-2:][::-1]:
        before, _ = torch.cuda.mem_get_info(device)
        graphs.record([shape])
        after, _ = torch.cuda.mem_get_info(device)
        taken.append(max(0, before - after))
    return taken[0] + max(taken[1:], default=0) * (len(graphs.shapes) - 1)


def _largest_step(
    model: CausalLM,
    cache: PagedKVCache,
    largest: LargestStep,
    link: HostLink,
    adapters: RunnerAdapters | None,
) -> None:
    """One prompt of all tokens, and a row of logits for every sequence, over a pool of one block.

    All its positions share that block, so what it computes is nonsense; its size is right.
    """
    max_tokens, rows = largest.tokens, min(largest.sequences, largest.tokens)
    blocks = np.zeros((1, cache.layout.blocks_for(max_tokens)), dtype=np.int32)
    plan = StepPlan(
        token_ids=np.zeros(max_tokens, dtype=np.int32),
        starts=np.zeros(1, dtype=np.int32),
        counts=np.array([max_tokens], dtype=np.int32),
        tables=(GroupTables(blocks),) * len(cache.layout.groups),
        samples=[SampleRow(SamplingParams(top_p=0.9), seed=i, position=0) for i in range(rows)],
        sample_rows=np.arange(rows, dtype=np.int32),
        adapter_slots=np.zeros(0 if adapters is None else 1, dtype=np.int32),
    )
    ModelRunner(model, cache, link=link, adapters=adapters).launch(plan).result()


def blocks_in(budget: MemoryBudget, layout: KVLayout) -> int:
    blocks = budget.pool // layout.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"No memory is left for a KV block of {layout.block_bytes:,} bytes; use a smaller "
            f"model or max_num_batched_tokens, or take blocks with num_blocks.\n{budget}"
        )
    return blocks


def weight_bytes(model: CausalLM) -> int:
    unique = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return sum(unique.values())
