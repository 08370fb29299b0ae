"""Every engine setting, said once: its name, type, default, help and check.

`LLM(...)` keywords, command-line flags and help texts are all made from the fields of
`EngineConfig`, and every value passes its field's check however it came in.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.checks import (
    INT32_MAX,
    Check,
    apply_checks,
    flag,
    refuse_unknown,
    setting,
    share,
    whole,
    whole_number,
)
from quire.errors import ConfigError

UINT64_MAX = 2**64 - 1
MOST_ADAPTERS = 1024
MOST_ADAPTER_RANK = 256

SIZE_UNITS = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(["", "k", "m", "g", "t"])},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(["k", "m", "g", "t"], start=1)},
}


def parse_size(value: Any) -> int:
    """Bytes from an int, or from text such as `8GiB`, `512MB` or `1.5 TiB`."""
    if not isinstance(value, str):
        return whole(value, 0, UINT64_MAX)
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", value.strip().lower())
    if found is None or found[2] not in SIZE_UNITS:
        raise ValueError(value)
    return whole(round(float(found[1]) * SIZE_UNITS[found[2]]), 0, UINT64_MAX)


def size() -> Check:
    return Check("a size in bytes such as 8GiB, 512MB or 0", parse_size, is_size=True)


def _power_of_two(low: int, high: int) -> Check:
    def accept(value: Any) -> int:
        number = whole(value, low, high)
        if number & (number - 1):
            raise ValueError(value)
        return number

    return Check(f"a power of two from {low} to {high}", accept)


def one_of(*choices: str) -> Check:
    def accept(value: Any) -> str:
        name = str(value).removeprefix("torch.")  # torch.float32 the object is "float32" too
        if name not in choices:
            raise ValueError(value)
        return name

    return Check(f"one of {', '.join(choices)}", accept, choices)


def _number_of(*choices: int) -> Check:
    names = one_of(*map(str, choices))
    return names._replace(accept=lambda value: int(names.accept(value)))


def text(says: str) -> Check:
    def accept(value: Any) -> str:
        text = os.fspath(value)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(value)
        return text

    return Check(says, accept)


_COUNT = whole_number(1, INT32_MAX)


class StepLimits(NamedTuple):
    tokens: int
    sequences: int


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one engine; None stands for "decided from the model and the device"."""

    model: str = setting(
        "smollm2",
        text("a model's name or path"),
        "built-in name, Hugging Face folder or repository, or GGUF file",
    )
    device: str = setting("auto", one_of("auto", "cpu", "cuda"), "where the model runs")
    dtype: str = setting(
        "auto",
        one_of("auto", "float32", "bfloat16", "float16"),
        "type of weights and activations; auto follows the checkpoint and the hardware",
    )
    load_format: str = setting(
        "auto",
        one_of("auto", "dummy"),
        "dummy makes random weights of the model's shape, for benchmarks",
    )
    task: str = setting(
        "auto",
        one_of("auto", "generate", "embed", "classify", "score"),
        "what the model is for; auto follows the checkpoint, and score makes a reranker of one "
        "that would answer yes or no",
    )
    quantization: str | None = setting(
        None,
        one_of("auto", "fp8", "int8", "int4", "none"),
        "quantise a 16-bit model's matrices while it is loaded (default: auto, as they are stored; "
        "none: as numbers, a GGUF file's too)",
    )
    activation_bits: int = setting(
        16,
        _number_of(16, 8),
        "of activations beside a GGUF file's types, int8 and int4 on a CPU: 8, as llama.cpp has, "
        "take 20 to 30 percent less time with batches and prompts, and may change an answer",
    )
    max_model_len: int | None = setting(
        None,
        _COUNT,
        "most tokens in one sequence (default: the model's, if the pool holds it)",
    )
    max_num_batched_tokens: int | None = setting(
        None, _COUNT, "most tokens in one step (default: 16,384 on a GPU, 2,048 on a CPU)"
    )
    max_num_seqs: int | None = setting(
        None, _COUNT, "most sequences in one step (default: 512 on a GPU, 64 on a CPU)"
    )
    block_size: int = setting(16, _power_of_two(1, 1024), "tokens in one block of the KV cache")
    num_blocks: int | None = setting(
        None, _COUNT, "blocks in the pool (default: sized from free memory)"
    )
    gpu_memory_utilization: float = setting(
        0.9, share(), "share of the GPU's memory that Quire may use"
    )
    kv_cache_dtype: str = setting(
        "auto",
        one_of("auto", "fp8"),
        "type of cached KV; auto is the model's, fp8 needs a GPU, but for latents",
    )
    enable_prefix_caching: bool = setting(
        True, flag(), "keep finished blocks and share common prefixes"
    )
    scheduling_policy: str = setting(
        "fcfs", one_of("fcfs", "priority", "cache-aware"), "who goes first when not all fit"
    )
    enforce_eager: bool = setting(
        False, flag(), "run every step without CUDA graphs, or recordings on a CPU"
    )
    tensor_parallel_size: int = setting(
        1, whole_number(1, 8), "devices, or on a CPU processes, that share one model"
    )
    enable_expert_parallel: bool = setting(
        False, flag(), "deal out a mixture's experts whole to the devices, not cut like the rest"
    )
    seed: int = setting(
        0, whole_number(-(2**63), UINT64_MAX), "seeds the requests that bring no seed of their own"
    )
    speculative: str | None = setting(
        None,
        text("ngram, mtp or a model's name"),
        "what drafts tokens: ngram (the text itself), mtp (the model's own MTP layer), or a "
        "smaller model of the same family",
    )
    num_speculative_tokens: int | None = setting(
        None,
        whole_number(1, 64),
        "most draft tokens a step (default: 8 by ngram, 1 by mtp, 4 by a model)",
    )
    enable_lora: bool = setting(False, flag(), "serve LoRA adapters over the model")
    max_loras: int = setting(
        8, whole_number(1, MOST_ADAPTERS), "adapters that one step can have, each in a slot"
    )
    max_lora_rank: int = setting(
        16, whole_number(1, MOST_ADAPTER_RANK), "the largest rank that an adapter may have"
    )
    max_cpu_loras: int | None = setting(
        None,
        whole_number(1, INT32_MAX),
        "adapters kept in host memory, those in slots counted in (default: four times max_loras)",
    )
    host_cache_bytes: int = setting(0, size(), "host memory for blocks beyond the pool")
    ssd_cache_dir: str | None = setting(
        None, text("one folder, or several with commas"), "folders of the SSD cache"
    )
    ssd_cache_bytes: int | None = setting(None, size(), "room of the SSD cache, over all folders")
    remote_cache_url: str | None = setting(
        None,
        text("an address such as redis://host:6379 or file:///mnt/shared/kv"),
        "shared remote cache",
    )
    tenant_cache_share: float = setting(
        1.0, share(), "most of host_cache_bytes and of ssd_cache_bytes that one tenant may take"
    )

    @classmethod
    def create(cls, **settings: Any) -> EngineConfig:
        """As the constructor, but an unknown name is a ConfigError that suggests the near miss."""
        refuse_unknown(cls, settings, ConfigError, "setting")
        return cls(**settings)

    def __post_init__(self) -> None:
        apply_checks(self, ConfigError)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: "
                "adapters in slots are in host memory, too; raise it, or lower max_loras."
            )

    @property
    def has_tiers(self) -> bool:
        """Whether KV is kept anywhere below the device."""
        return bool(self.host_cache_bytes or self.ssd_cache_dir or self.remote_cache_url)

    @property
    def num_host_adapters(self) -> int:
        """Adapters that host memory keeps: as asked for, or some beside those in slots."""
        return self.max_cpu_loras or 4 * self.max_loras

    def step_limits(self, device_type: str, only_reads: bool = False) -> StepLimits:
        """The size of the largest step: as asked for, or what suits the device. Models that only
        read are small, and it takes more tokens until a GPU is busier than its host."""
        default = StepLimits(2_048, 64)
        if device_type == "cuda":
            default = StepLimits(32_768, 1_024) if only_reads else StepLimits(16_384, 512)
        return StepLimits(
            self.max_num_batched_tokens or default.tokens,
            self.max_num_seqs or default.sequences,
        )
