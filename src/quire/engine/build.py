"""Puts an engine together from its settings."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import torch

from quire.config import EngineConfig
from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.adapters.no_slots import NO_SLOTS
from quire.engine.build_drafter import build_speculation, mtp_speculation
from quire.engine.build_store import block_namespace, build_store, check_tiers, has_tiers
from quire.engine.engine import Engine
from quire.engine.model_facts import ModelFacts, Observed
from quire.engine.observe.startup import Startup
from quire.engine.schedule.grouped_tiering import tiering_for
from quire.engine.schedule.no_tiers import NO_TIERS
from quire.engine.schedule.scheduler import Scheduler
from quire.errors import ConfigError
from quire.histogram import BucketCounts
from quire.kernels.fp8 import FP8, SCALE
from quire.kv.layout import KVLayout
from quire.kv.prefix import PrefixCache
from quire.layers.formats import AllDense, MatrixFormats
from quire.layers.tp import SINGLE
from quire.models.config import ModelConfig
from quire.models.pool_groups import declared_groups
from quire.models.source import ModelSource, rounded_twice
from quire.progress import human_bytes, say, say_step
from quire.ranks.leader import Ranks
from quire.ranks.pool import ShardedPool
from quire.ranks.rank_model import RankModel, check_size, open_source
from quire.ranks.runner import LeadingRunner
from quire.runner.attention_clock import AttentionClock
from quire.runner.device import choose_device, free_cached_memory

log = logging.getLogger("quire")

FP8_CAPABILITY = (8, 9)  # the first GPUs that convert e4m3
DIGEST = "hashing the model's files"


def build_engine(
    config: EngineConfig,
    progress: bool = True,
    through_group: bool = False,
    publishes_events: bool = False,
    formats: MatrixFormats | None = None,
) -> Engine:
    """`publishes_events`: it will be asked to `publish_events`.

    `formats`: what the matrices of a dense checkpoint are stored in instead.

    `through_group`: have one rank, too, do all that several do, to see what that costs.
    """
    startup = Startup(say_step if progress else None)
    device = choose_device(config.device)
    size = config.tensor_parallel_size
    with startup.phase("opening", f"opening {config.model}"):
        source = open_source(config, device, progress)
        if formats is not None:
            source.config = replace(source.config, formats=formats)
        _check_length(config, source.config)
        check_tiers(config)
        if (said := rounded_twice(source, config.quantization)) is not None:
            log.warning(said)
        _check_fp8(config, source.config, device)
        check_size(size, source.config, device, config.enable_expert_parallel)
    ranks = Ranks(config, device, size) if size > 1 or through_group else None
    names_blocks = publishes_events or has_tiers(config)
    try:
        if names_blocks:  # which takes the model's fingerprint: every byte of its files is hashed
            source.fingerprint.begin()
        engine = _build(config, source, device, ranks, startup, progress, names_blocks)
    except BaseException:
        source.fingerprint.cancel()
        if ranks is not None:
            ranks.close()
        raise
    del source  # a GGUF file's header has all of its vocabulary
    free_cached_memory()
    return engine


def _build(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device,
    ranks: Ranks | None,
    startup: Startup,
    progress: bool,
    names_blocks: bool,
) -> Engine:
    rank_model = RankModel(config, source, SINGLE if ranks is None else ranks.tp, device)
    limits, layout = rank_model.limits, rank_model.layout
    with startup.phase("weights", f"loading weights: {_weights(rank_model)}"):
        rank_model.load(progress)
        speculation = build_speculation(config, source, rank_model.dtype, device, limits, progress)
        if ranks is not None:
            ranks.meet(has_tiers(config))
    if device.type == "cuda":
        with startup.phase("kernels", "compiling kernels, or finding them compiled"):
            rank_model.warm_up(has_tiers(config))
    with startup.phase("memory", "sizing the pool of KV blocks"):
        num_blocks = rank_model.count_blocks()
        if ranks is not None:
            num_blocks = min([num_blocks, *ranks.hear("blocks")])
        max_model_len = _max_model_len(config, source.config, layout, num_blocks, limits.tokens)
        if ranks is not None:
            ranks.tell({"num_blocks": num_blocks, "max_model_len": max_model_len})
        rank_model.make_pool(num_blocks)
    if rank_model.has_graphs:
        with startup.phase("graphs", "recording CUDA graphs"):
            rank_model.record(max_model_len)
    if ranks is not None:
        with startup.phase("ranks", "waiting for the other ranks"):
            ranks.start_work()
    with startup.phase("tokenizer", "loading the tokenizer"):
        tokenizer = source.tokenizer()
    namespace = None
    if names_blocks:
        with nullcontext() if source.fingerprint.is_known else startup.phase("digest", DIGEST):
            namespace = block_namespace(
                source,
                rank_model.dtype,
                layout,
                config.tensor_parallel_size,
                config.enable_expert_parallel,
                config.activation_bits,
            )
    with startup.phase("tiers", "opening the lower tiers" if has_tiers(config) else ""):
        pool = rank_model.pool if ranks is None else ShardedPool(rank_model.pool, ranks)
        store = build_store(config, namespace, pool, layout.windows)
    if progress:
        name = _types(rank_model)
        size = f"{num_blocks:,} blocks of {layout.block_size} tokens"
        say(f"{config.model} in {name} on {device.type}, {size}; {startup}")
        if rank_model.budget is not None:
            say(str(rank_model.budget))
    attention_seconds = BucketCounts([1e-5 * 2**i for i in range(18)])  # to a second and more
    runner = rank_model.runner(AttentionClock(device, attention_seconds.add))
    if runner.draft_layer is not None:
        speculation = mtp_speculation(config, runner.draft_layer)
    leading = runner if ranks is None else LeadingRunner(runner, ranks)
    adapters = None
    if config.enable_lora:
        adapters = AdapterCatalog(leading, config.max_loras, config.num_host_adapters)
    cache = PrefixCache(num_blocks, layout.block_size, config.enable_prefix_caching, layout.windows)
    scheduler = Scheduler(
        cache,
        limits.tokens,
        limits.sequences,
        config.scheduling_policy,
        tiering_for(store, cache) if store is not None else NO_TIERS,
        speculation,
        slots=NO_SLOTS if adapters is None else adapters.slots,
    )
    return Engine(
        scheduler,
        leading,
        ModelFacts(source.config.vocab_size, max_model_len, source.config.eos_token_ids, tokenizer),
        config.seed,
        overlap=device.type == "cuda",
        observed=Observed(
            startup,
            block_bytes=pool.block_bytes,
            attention_seconds=attention_seconds,
            namespace=namespace,
        ),
        adapters=adapters,
    )


def _weights(model: RankModel) -> str:
    """What is to be loaded, in words."""
    name = _types(model)
    whose = f" for each of {model.tp.size} ranks" if model.tp.size > 1 else ""
    drafter = model.config.speculative
    besides = f", then the drafter {drafter}" if drafter else ""
    return f"{human_bytes(model.num_weight_bytes)}{whose} in {name} on {model.device.type}{besides}"


def _types(model: RankModel) -> str:
    """What the weights are stored in, and what is computed in."""
    name = str(model.dtype).removeprefix("torch.")
    is_dense = isinstance(model.source.config.formats, AllDense)
    return name if is_dense else f"the checkpoint's own types and {name}"


def _check_fp8(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """A CPU turns latents into numbers; K and V are read by a GPU's kernels alone."""
    if config.kv_cache_dtype != "fp8":
        return
    groups = declared_groups(model)
    if device.type == "cuda":
        converts = torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    else:
        converts = KVLayout(groups, config.block_size, FP8).is_replicated
    if not converts:
        raise ConfigError(
            "kv_cache_dtype='fp8' needs an NVIDIA GPU of the Ada or Hopper generation or later; "
            "leave it at 'auto' here."
        )
    ranks = (stream.rank for group in groups for stream in group.streams)
    ragged = next((rank for rank in ranks if rank and rank % SCALE.itemsize), None)
    if ragged is not None:  # the scales behind a latent's bytes would not be aligned
        raise ConfigError(
            f"kv_cache_dtype='fp8' is for latents of a multiple of {SCALE.itemsize} numbers, and "
            f"the model has kv_lora_rank={ragged:,}; leave it at 'auto' here."
        )


def _check_length(config: EngineConfig, model: ModelConfig) -> None:
    asked, has = config.max_model_len, model.max_position_embeddings
    if asked is not None and asked > has:
        raise ConfigError(
            f"max_model_len={asked:,} is more than the {has:,} positions the model was made for; "
            "ask for at most that."
        )


def _max_model_len(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, num_blocks: int, step_tokens: int
) -> int:
    """The model's own length, or what was asked for, or as much of it as the pool holds."""
    wanted = config.max_model_len or max(2, model.max_position_embeddings)
    room = layout.longest_sequence(num_blocks, step_tokens, wanted)
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
