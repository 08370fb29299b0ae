"""Puts an engine together from its settings."""

from __future__ import annotations

import logging
import sys

import torch

from quire.config import EngineConfig
from quire.engine.build_drafter import build_speculation
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.startup import Startup
from quire.engine.store import block_namespace, build_store, check_tiers, has_tiers
from quire.engine.tiering import Tiering
from quire.errors import ConfigError
from quire.kernels.backend import backend_for
from quire.kernels.fp8 import FP8
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv.prefix import PrefixCache
from quire.models.config import ModelConfig
from quire.models.source import build_model, open_model
from quire.runner.attention_clock import AttentionClock
from quire.runner.device import choose_device, choose_dtype
from quire.runner.graphs import StepGraphs
from quire.runner.memory import (
    LargestStep,
    blocks_in,
    cpu_budget,
    cuda_budget,
    free_host_memory,
    weight_bytes,
)
from quire.runner.runner import ModelRunner
from quire.runner.transfer import avoid_copy_engines
from quire.runner.warmup import compile_ahead, warm_up
from quire.tally import Tally

log = logging.getLogger("quire")

FP8_CAPABILITY = (8, 9)  # the first GPUs that convert e4m3


def build_engine(config: EngineConfig, progress: bool = True) -> Engine:
    startup = Startup()
    device = choose_device(config.device)
    limits = config.step_limits(device.type)
    with startup.phase("opening"):
        source = open_model(config.model, config.load_format, progress)
        dtype = choose_dtype(config.dtype, source.config.dtype, device)
        _check_length(config, source.config)
        check_tiers(config)
        _check_fp8(config, device)
    layout = _layout(config, source.config, FP8 if config.kv_cache_dtype == "fp8" else dtype)
    backend = backend_for(device)
    backend.prepare(dtype)  # while the weights are loaded
    if device.type == "cuda":
        compiled = compile_ahead(source.config, layout, dtype, device, limits.tokens)
    with startup.phase("weights"):
        model = build_model(source, dtype, device, progress)
        if device.type == "cpu" and weight_bytes(model) <= free_host_memory() // 4:
            model.pack()
        speculation = build_speculation(config, source, dtype, device, limits, progress)
    has_graphs = device.type == "cuda" and not config.enforce_eager
    if device.type == "cuda":
        with startup.phase("kernels"):
            compiled.result()
            if has_tiers(config):
                avoid_copy_engines()  # only now: what is compiled ahead is not launched
            warm_up(model, layout, device, limits.tokens)
    num_blocks, budget = config.num_blocks, None
    with startup.phase("memory"):
        if num_blocks is None:
            longest = config.max_model_len or source.config.max_position_embeddings
            largest = LargestStep(limits.tokens, limits.sequences, longest)
            share = config.gpu_memory_utilization
            budget = (
                cuda_budget(model, layout, backend, device, share, largest, has_graphs)
                if device.type == "cuda"
                else cpu_budget(model)
            )
            num_blocks = blocks_in(budget, layout)
        max_model_len = _max_model_len(config, source.config, layout, num_blocks)
        pool = PagedKVCache(layout, num_blocks, device, backend)
    graphs = None
    if has_graphs:
        with startup.phase("graphs"):
            graphs = StepGraphs(model, pool, limits.sequences, limits.tokens, max_model_len)
            graphs.record()
    with startup.phase("tiers"):
        namespace = block_namespace(source, dtype, layout)
        store = build_store(config, namespace, pool)
    with startup.phase("tokenizer"):
        tokenizer = source.tokenizer()
    if progress:
        name = str(dtype).removeprefix("torch.")
        size = f"{num_blocks:,} blocks of {layout.block_size} tokens"
        print(f"{config.model} in {name} on {device.type}, {size}; {startup}", file=sys.stderr)
        if budget is not None:
            print(budget, file=sys.stderr)
    cache = PrefixCache(num_blocks, layout.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(
        cache,
        limits.tokens,
        limits.sequences,
        config.scheduling_policy,
        Tiering(store, cache) if store is not None else None,
        speculation,
    )
    attention_seconds = Tally([1e-5 * 2**i for i in range(18)])  # to a second and more
    clock = AttentionClock(device, attention_seconds.add)
    return Engine(
        scheduler,
        ModelRunner(model, pool, graphs, clock),
        tokenizer,
        source.config.vocab_size,
        max_model_len,
        source.config.eos_token_ids,
        config.seed,
        overlap=device.type == "cuda",
        startup=startup,
        block_bytes=layout.block_bytes,
        attention_seconds=attention_seconds,
        namespace=namespace,
    )


def _layout(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KVLayout:
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )


def _check_fp8(config: EngineConfig, device: torch.device) -> None:
    if config.kv_cache_dtype != "fp8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            "kv_cache_dtype='fp8' needs an NVIDIA GPU of the Ada or Hopper generation or later; "
            "leave it at 'auto' here."
        )


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
