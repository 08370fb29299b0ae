"""How many blocks the pool gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.models.llama import CausalLM
from quire.params import SamplingParams
from quire.runner.plan import StepPlan
from quire.runner.runner import ModelRunner
from quire.runner.sampler import SampleRow

GIB = 1 << 30
CPU_POOL_LIMIT = 4 * GIB


@dataclass(frozen=True)
class MemoryBudget:
    """Where the device's memory goes, in bytes."""

    total: int
    weights: int
    activations: int  # the most a step takes besides
    pool: int

    def __str__(self) -> str:
        rows = {
            "memory": self.total,
            "weights": self.weights,
            "largest step": self.activations,
            "KV pool": self.pool,
        }
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in rows.items())


def cpu_pool_bytes() -> int:
    """A quarter of what is free, four GiB at most: a laptop has other things to do."""
    return min(free_host_memory() // 4, CPU_POOL_LIMIT)


def cpu_budget(model: CausalLM) -> MemoryBudget:
    return MemoryBudget(free_host_memory(), weight_bytes(model), 0, cpu_pool_bytes())


def cuda_budget(
    model: CausalLM,
    layout: KVLayout,
    backend: Backend,
    device: torch.device,
    utilization: float,
    max_tokens: int,
    max_seqs: int,
) -> MemoryBudget:
    """What is really left of the allowed share once the largest step has been run."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _largest_step(model, layout, backend, device, max_tokens, max_seqs)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    held_by_all = total - free  # this process, its CUDA context, and its neighbours
    pool = int(total * utilization) - held_by_all - activations
    return MemoryBudget(total, weight_bytes(model), activations, pool)


def _largest_step(
    model: CausalLM,
    layout: KVLayout,
    backend: Backend,
    device: torch.device,
    max_tokens: int,
    max_seqs: int,
) -> None:
    """One prompt of all tokens, and a row of logits for every sequence, over a pool of one block.

    All its positions share that block, so what it computes is nonsense; its size is right.
    """
    runner = ModelRunner(model, PagedKVCache(layout, 1, device, backend))
    rows = min(max_seqs, max_tokens)
    plan = StepPlan(
        token_ids=np.zeros(max_tokens, dtype=np.int32),
        starts=np.zeros(1, dtype=np.int32),
        counts=np.array([max_tokens], dtype=np.int32),
        block_tables=np.zeros((1, layout.blocks_for(max_tokens)), dtype=np.int32),
        samples=[SampleRow(SamplingParams(top_p=0.9), seed=i, position=0) for i in range(rows)],
        sample_rows=np.arange(rows, dtype=np.int32),
    )
    runner.launch(plan).result()


def blocks_in(budget: MemoryBudget, layout: KVLayout) -> int:
    blocks = budget.pool // layout.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"No memory is left for a KV block of {layout.block_bytes:,} bytes ({budget}); use a "
            "smaller model, or say how many blocks to take with num_blocks."
        )
    return blocks


def free_host_memory() -> int:
    """Bytes that can be taken without swapping; a container's limit counts too."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(stat["inactive_file"])  # files that were read count as used
    except (OSError, ValueError, KeyError):  # no group, or no limit set
        return free
    return max(0, min(free, limit - used + reclaimable))


def weight_bytes(model: CausalLM) -> int:
    unique = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return sum(unique.values())
