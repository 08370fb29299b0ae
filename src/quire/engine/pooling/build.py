"""Puts an engine together, of whichever kind its model needs."""

from __future__ import annotations

import numpy as np

from quire.config import EngineConfig
from quire.engine.build import build_engine
from quire.engine.engine import Engine
from quire.engine.limits import Limits
from quire.engine.observe.startup import Startup
from quire.engine.pooling.engine import PoolingEngine
from quire.errors import ConfigError
from quire.kernels.gguf_product import ACTIVATION_BITS
from quire.layers.weights import room_needed
from quire.models.causal_lm import CausalLM
from quire.models.pooling.open import open_pooling
from quire.models.pooling.source import PoolingSource
from quire.models.quantization.making import MADE
from quire.progress import human_bytes, say, say_step
from quire.runner.device import choose_device, choose_dtype, free_cached_memory
from quire.runner.pooling_runner import PoolingRunner
from quire.runner.text_batch import TextBatch

WARM_LENGTHS = (3, 40, 600)  # of texts that have a GPU's kernels compiled


def build_any_engine(
    config: EngineConfig, progress: bool = True, publishes_events: bool = False
) -> Engine | PoolingEngine:
    weights = config.load_format != "dummy"
    source = open_pooling(config.model, config.task, weights, progress)
    if source is None:
        return build_engine(config, progress, publishes_events=publishes_events)
    return build_pooling_engine(config, source, progress)


def build_pooling_engine(
    config: EngineConfig, source: PoolingSource, progress: bool = True
) -> PoolingEngine:
    _refuse_unused(config)
    startup = Startup(say_step if progress else None)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, source.config, device)
    name = str(dtype).removeprefix("torch.")
    size = human_bytes(room_needed(source.shapes(), dtype))
    with startup.phase("weights", f"loading weights: {size} in {name} on {device.type}"):
        model = source.build(dtype, device, progress, config.load_format == "dummy")
        model.pack()
    max_len = _max_len(config, source)
    if isinstance(model.body, CausalLM):
        model.body.reserve(max_len, device)
    with startup.phase("tokenizer", "loading the tokenizer"):
        tokenizer = source.tokenizer()
    runner = PoolingRunner(model, device, dtype)
    if device.type == "cuda":
        with startup.phase("kernels", "compiling kernels, or finding them compiled"):
            for length in WARM_LENGTHS:
                ids = [np.zeros(min(length, max_len), dtype=np.int64)] * 2
                runner.launch(TextBatch.of(ids)).wait()
    facts = source.facts()
    if progress:
        what = "classes" if facts.labels else "numbers a text"
        say(f"{config.model} in {name} on {device.type}, {facts.size:,} {what}; {startup}")
    free_cached_memory()
    return PoolingEngine(
        runner,
        facts,
        Limits(source.config.vocab_size, max_len, config.scheduling_policy, task=facts.task),
        config.step_limits(device.type, only_reads=True),
        tokenizer,
        overlap=device.type == "cuda",
        startup=startup,
    )


def _refuse_unused(config: EngineConfig) -> None:
    """What is asked for in earnest, and would do nothing."""
    asked = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "quantization": config.quantization in MADE,
        "activation_bits": config.activation_bits != ACTIVATION_BITS,
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "speculative": config.speculative is not None,
        "enable_lora": config.enable_lora,
        "host_cache_bytes": config.host_cache_bytes > 0,
        "ssd_cache_dir": config.ssd_cache_dir is not None,
        "remote_cache_url": config.remote_cache_url is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{name} is for models that generate, and {config.model} gives embeddings or "
                f"classes: leave it out."
            )


def _max_len(config: EngineConfig, source: PoolingSource) -> int:
    most, asked = source.config.max_position_embeddings, config.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_model_len={asked:,} is more than the {most:,} positions the model was made for; "
            "ask for at most that."
        )
    return source.max_len if asked is None else asked
