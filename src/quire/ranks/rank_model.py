"""One rank's shard of a model: weights, pool, graphs. Every rank builds its own by the same steps.

    load ─ warm_up ─ count_blocks ─ (the smallest count of all) ─ make_pool ─ record

From `warm_up` on the ranks work together, so each has to take the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.host_memory import free_host_memory
from quire.kernels.backend import backend_for
from quire.kernels.fp8 import FP8
from quire.kernels.gguf_product import ACTIVATION_BITS, multiplies_bytes
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.layers.matrix import Matrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import room_needed
from quire.models.adapters.model_adapters import ModelAdapters
from quire.models.adapters.reader import AdapterReader
from quire.models.config import ModelConfig
from quire.models.deepseek_mtp import DeepseekMTP
from quire.models.pool_groups import declared_groups, pool_groups
from quire.models.source import (
    ModelSource,
    build_mtp,
    check_mtp,
    fill_model,
    open_model,
    shapes,
)
from quire.ranks.group import Group
from quire.runner.adapters import RunnerAdapters
from quire.runner.attention_clock import AttentionClock
from quire.runner.device import choose_dtype, keeps_types
from quire.runner.draft_layer import DraftLayer
from quire.runner.graphs import StepGraphs
from quire.runner.memory import (
    LargestStep,
    MemoryBudget,
    blocks_in,
    cpu_budget,
    cuda_budget,
    weight_bytes,
)
from quire.runner.recorded_steps import recorded_steps
from quire.runner.runner import ModelRunner
from quire.runner.transfer import BY_COPY_ENGINES, HostLink
from quire.runner.warmup import compile_ahead, warm_up

MTP = "mtp"  # of `speculative`: the model's own layer drafts
# Layers with a window give back the blocks that it has passed; False: they keep all.
WINDOW_GROUPS = True


def device_of(rank: int, first: torch.device) -> torch.device:
    """The GPUs behind that of rank 0, in turn; CPUs are one device."""
    if first.type != "cuda":
        return first
    return torch.device("cuda", ((first.index or 0) + rank) % torch.cuda.device_count())


def check_size(
    size: int, model: ModelConfig, device: torch.device, expert_parallel: bool = False
) -> None:
    """Refuse a number of ranks that the machine or the model has no parts for."""
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={size} needs as many GPUs and torch finds "
            f"{torch.cuda.device_count()}; lower it."
        )
    if expert_parallel and model.experts is None:
        raise ConfigError(
            "enable_expert_parallel is for mixtures of experts, and this model has none: leave it "
            "out."
        )
    tp = TensorParallel(0, size, expert_parallel=expert_parallel)
    declared_groups(model, tp)  # it has to be built for that


def check_activations(bits: int, device: torch.device, matrices: Sequence[Matrix]) -> None:
    """Refuse to round what nothing would round, or what would be no faster for it."""
    if bits == ACTIVATION_BITS:
        return
    if device.type == "cuda":
        why = "a GPU's kernels choose for themselves"
    elif not any(matrix.multiplies_codes for matrix in matrices):
        why = "this model has none, though quantization='int8' would make some"
    elif not multiplies_bytes():
        why = "this CPU multiplies 16 bits as fast"
    else:
        return
    raise ConfigError(
        f"activation_bits={bits} is for matrices of codes on a CPU: leave it out, as {why}."
    )


def open_source(config: EngineConfig, device: torch.device, progress: bool) -> ModelSource:
    """What every rank reads its part of the model from."""
    source = open_model(
        config.model,
        config.load_format,
        progress,
        quantization=config.quantization,
        max_len=config.max_model_len,
        keeps_types=keeps_types(config.dtype, device),
        on_gpu=device.type == "cuda",
    )
    if config.speculative == MTP:
        source.config = source.config.with_mtp()
        check_mtp(source)
    return source


class RankModel:
    def __init__(
        self, config: EngineConfig, source: ModelSource, tp: TensorParallel, device: torch.device
    ) -> None:
        self.config = config
        self.source = source
        self.tp = tp
        self.device = device
        self.limits = config.step_limits(device.type)
        self.dtype = choose_dtype(config.dtype, source.config, device)
        self.layout = self._layout()
        self.backend = backend_for(device)
        self.model = shapes(source.config, tp)  # without memory, until `load`
        matrices = [module for module in self.model.modules() if isinstance(module, Matrix)]
        check_activations(config.activation_bits, device, matrices)
        for matrix in matrices:
            matrix.activation_bits = config.activation_bits
        self.mtp: DeepseekMTP | None = None  # where it drafts, on rank 0
        self.adapters: RunnerAdapters | None = None  # with `enable_lora`
        self.pool: PagedKVCache
        self.link = BY_COPY_ENGINES
        self.graphs: StepGraphs | None = None
        self.budget: MemoryBudget | None = None

    def _layout(self) -> KVLayout:
        dtype = FP8 if self.config.kv_cache_dtype == "fp8" else self.dtype
        groups = pool_groups(self.source.config, self.tp, window_groups=WINDOW_GROUPS)
        return KVLayout(groups, self.config.block_size, dtype, self.dtype)

    @property
    def num_weight_bytes(self) -> int:
        """What this rank's weights take, or will take."""
        return room_needed(self.model, self.dtype)

    @property
    def has_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.config.enforce_eager

    def load(self, progress: bool) -> None:
        """The weights; what can be compiled without them is, meanwhile."""
        self.backend.prepare(self.dtype)
        if self.device.type == "cuda":
            shape, limits = self.source.config, self.limits
            self._compiled = compile_ahead(
                shape, self.layout, self.dtype, self.device, limits.tokens, self.tp.alone
            )
        fill_model(self.model, self.source, self.dtype, self.device, progress)
        if self.config.speculative == MTP and self.tp.rank == 0:
            self.mtp = build_mtp(self.source, self.dtype, self.device, progress)
        if self.config.enable_lora:
            self._make_adapter_slots()
        weights = self.tp.size * weight_bytes(self.model)
        if self.device.type == "cpu" and weights <= free_host_memory() // 4:
            self.model.pack()

    def _make_adapter_slots(self) -> None:
        """Before the KV pool is sized: what they take is not the pool's."""
        count, rank = self.config.max_loras, self.config.max_lora_rank
        reader = AdapterReader(self.source.config, self.tp.alone, self.dtype, rank)
        try:
            slots = ModelAdapters(self.model, count, rank, self.dtype, self.device)
            self.adapters = RunnerAdapters(slots, lambda path: reader.read(Path(path)))
        except (MemoryError, RuntimeError) as error:  # torch raises the latter, on any device
            if not isinstance(error, MemoryError) and "memory" not in str(error):
                raise
            raise ConfigError(
                f"{count} slots for adapters of rank {rank} do not fit beside the model on "
                f"{self.device}: lower max_loras or max_lora_rank."
            ) from None

    def warm_up(self, moves_kv: bool) -> None:
        """The kernels of a GPU. `moves_kv`: whether there are tiers below the pool."""
        self._compiled.result()
        if moves_kv:
            self.link = HostLink(by_kernels=True)  # not before: a dry run launches no kernel
        group = self.tp.group
        # In threads: they would not all meet their like on the other ranks.
        with group.silence() if isinstance(group, Group) else nullcontext():
            warm_up(
                self.model,
                self.layout,
                self.device,
                self.limits.tokens,
                self.link,
                self.adapters,
            )

    def count_blocks(self) -> int:
        """The blocks there is room for, unless `num_blocks` says how many there are to be."""
        config = self.config
        if config.num_blocks is not None:
            return config.num_blocks
        longest = config.max_model_len or self.source.config.max_position_embeddings
        slot_bytes = 0 if self.adapters is None else self.adapters.num_bytes
        self.budget = (
            cuda_budget(
                self.model,
                self.layout,
                self.backend,
                self.device,
                config.gpu_memory_utilization,
                LargestStep(self.limits.tokens, self.limits.sequences, longest),
                self.has_graphs,
                self.link,
                self.adapters,
            )
            if self.device.type == "cuda"
            else cpu_budget(self.model, self.tp.size, slot_bytes)
        )
        return blocks_in(self.budget, self.layout)

    def make_pool(self, num_blocks: int) -> None:
        size = num_blocks * self.layout.block_bytes
        try:
            if self.device.type == "cpu" and size > free_host_memory():
                raise MemoryError
            self.pool = PagedKVCache(self.layout, num_blocks, self.device, self.backend)
        except (MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"A pool of {num_blocks:,} blocks takes {size / 2**30:.1f} GiB, more than is free "
                f"on {self.device}; lower num_blocks."
            ) from None

    def record(self, max_model_len: int) -> None:
        """The graphs of a GPU's steps."""
        sequences, tokens = self.limits.sequences, self.limits.tokens
        slots = None if self.adapters is None else self.adapters.slots
        self.graphs = StepGraphs(self.model, self.pool, sequences, tokens, max_model_len, slots)
        self.graphs.record()

    def runner(self, clock: AttentionClock | None = None) -> ModelRunner:
        recorded = None if self.config.enforce_eager else recorded_steps(self.model, self.pool)
        draft_layer = None
        if self.mtp is not None:
            draft_layer = DraftLayer(self.mtp, self.pool, self.link)
        return ModelRunner(
            self.model,
            self.pool,
            self.graphs,
            clock,
            self.link,
            recorded,
            draft_layer,
            self.adapters,
        )
