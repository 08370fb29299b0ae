"""Puts an engine together from its settings."""

from __future__ import annotations

import logging
import sys

import torch

from quire.config import EngineConfig, StepLimits
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.errors import ConfigError
from quire.kernels.backend import Backend, backend_for
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv.prefix import PrefixCache
from quire.models.config import ModelConfig
from quire.models.llama import CausalLM
from quire.models.source import build_model, open_model
from quire.runner.device import choose_device, choose_dtype
from quire.runner.memory import (
    MemoryBudget,
    blocks_in,
    cpu_budget,
    cuda_budget,
    free_host_memory,
    weight_bytes,
)
from quire.runner.runner import ModelRunner

log = logging.getLogger("quire")


def build_engine(config: EngineConfig, progress: bool = True) -> Engine:
    device = choose_device(config.device)
    limits = config.step_limits(device.type)
    source = open_model(config.model, config.load_format, progress)
    dtype = choose_dtype(config.dtype, source.config.dtype, device)
    _check_length(config, source.config)
    backend = backend_for(device)
    backend.prepare(dtype)  # while the weights are loaded
    model = build_model(source, dtype, device, progress)
    if device.type == "cpu" and weight_bytes(model) <= free_host_memory() // 4:
        model.pack()
    layout = _layout(config, source.config, dtype)
    num_blocks, memory = config.num_blocks, "as many as asked for"
    if num_blocks is None:
        budget = _budget(limits, config, model, layout, backend, device)
        num_blocks, memory = blocks_in(budget, layout), str(budget)
    max_model_len = _max_model_len(config, source.config, layout, num_blocks)
    if progress:
        name = str(dtype).removeprefix("torch.")
        size = f"{num_blocks:,} blocks of {layout.block_size} tokens"
        print(f"{config.model} in {name} on {device.type}; {size}: {memory}", file=sys.stderr)
    pool = PagedKVCache(layout, num_blocks, device, backend)
    scheduler = Scheduler(
        PrefixCache(num_blocks, layout.block_size, config.enable_prefix_caching),
        limits.tokens,
        limits.sequences,
        config.scheduling_policy,
    )
    return Engine(
        scheduler,
        ModelRunner(model, pool),
        source.tokenizer(),
        source.config.vocab_size,
        max_model_len,
        source.config.eos_token_ids,
        config.seed,
    )


def _layout(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KVLayout:
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )


def _budget(
    limits: StepLimits,
    config: EngineConfig,
    model: CausalLM,
    layout: KVLayout,
    backend: Backend,
    device: torch.device,
) -> MemoryBudget:
    if device.type == "cpu":
        return cpu_budget(model)
    share = config.gpu_memory_utilization
    return cuda_budget(model, layout, backend, device, share, limits.tokens, limits.sequences)


def _check_length(config: EngineConfig, model: ModelConfig) -> None:
    asked, has = config.max_model_len, model.max_position_embeddings
    if asked is not None and asked > has:
        raise ConfigError(
            f"max_model_len={asked:,} is more than the {has:,} positions the model was made for; "
            "ask for at most that."
        )


def _max_model_len(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, num_blocks: int
) -> int:
    """The model's own length, or what was asked for, or as much of it as the pool holds."""
    room = num_blocks * layout.block_size
    if config.max_model_len is not None:
        if config.max_model_len > room:
            raise ConfigError(
                f"max_model_len={config.max_model_len:,} needs more than the pool's {num_blocks:,} "
                f"blocks, which hold {room:,} tokens; lower it or give the pool more room."
            )
        return config.max_model_len
    if room < 2:
        raise ConfigError(
            f"A pool of {num_blocks} block(s) of {layout.block_size} token(s) cannot hold a "
            "prompt and an answer; raise num_blocks or block_size."
        )
    if room < model.max_position_embeddings:
        log.warning(
            "max_model_len is %d instead of the model's %d: the pool holds no more.",
            room,
            model.max_position_embeddings,
        )
    return min(room, model.max_position_embeddings)
