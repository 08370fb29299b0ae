"""Settings: the defaults, what each accepts, and one clear sentence for what it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import EngineConfig, parse_size
from quire.errors import ConfigError

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("model", "", "model must be a model's name or path, not ''"),
    ("model", 7, "model must be a model's name or path, not 7"),
    ("device", "gpu", "device must be one of auto, cpu, cuda, not 'gpu'"),
    ("dtype", "int8", "dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
    ("dtype", torch.int8, "dtype must be one of auto, float32, bfloat16, float16, not torch.int8"),
    ("load_format", "pickle", "load_format must be one of auto, dummy, not 'pickle'"),
    ("max_model_len", 0, "max_model_len must be a whole number from 1 to 2,147,483,647, not 0"),
    ("max_num_batched_tokens", -1, "max_num_batched_tokens must be a whole number from 1"),
    ("max_num_seqs", 2**31, "max_num_seqs must be a whole number from 1 to 2,147,483,647"),
    ("max_num_seqs", 8.0, "max_num_seqs must be a whole number"),
    ("max_num_seqs", float("nan"), "max_num_seqs must be a whole number"),
    ("block_size", 12, "block_size must be a power of two from 1 to 1024, not 12"),
    ("block_size", 0, "block_size must be a power of two from 1 to 1024, not 0"),
    ("block_size", 2048, "block_size must be a power of two from 1 to 1024, not 2048"),
    ("block_size", "16", "block_size must be a power of two from 1 to 1024, not '16'"),
    ("block_size", True, "block_size must be a power of two from 1 to 1024, not True"),
    ("block_size", None, "block_size must be a power of two from 1 to 1024, not None"),
    ("num_blocks", 0, "num_blocks must be a whole number from 1"),
    ("gpu_memory_utilization", 0, "must be a number above 0 and at most 1, not 0"),
    ("gpu_memory_utilization", 1.01, "must be a number above 0 and at most 1, not 1.01"),
    ("gpu_memory_utilization", float("nan"), "must be a number above 0 and at most 1, not nan"),
    ("gpu_memory_utilization", "0.9", "must be a number above 0 and at most 1, not '0.9'"),
    ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, not 1"),
    ("scheduling_policy", "lifo", "must be one of fcfs, priority, cache-aware, not 'lifo'"),
    ("enforce_eager", "no", "enforce_eager must be True or False, not 'no'"),
    ("tensor_parallel_size", 9, "must be a whole number from 1 to 8, not 9"),
    ("seed", 2**64, "seed must be a whole number from -9,223,372,036,854,775,808 to"),
    ("host_cache_bytes", "8 gallons", "must be a size in bytes such as 8GiB, 512MB or 0, not"),
    ("tenant_cache_share", 0, "tenant_cache_share must be a number above 0 and at most 1, not 0"),
    ("host_cache_bytes", -1, "must be a size in bytes such as 8GiB, 512MB or 0, not -1"),
]


def test_defaults() -> None:
    config = EngineConfig.create()
    assert (config.model, config.device, config.dtype) == ("smollm2", "auto", "auto")
    assert (config.block_size, config.gpu_memory_utilization) == (16, 0.9)
    assert (config.scheduling_policy, config.enable_prefix_caching) == ("fcfs", True)
    assert (config.max_model_len, config.num_blocks) == (None, None)


@pytest.mark.parametrize(
    ("device_type", "tokens", "sequences"), [("cuda", 16_384, 512), ("cpu", 2_048, 64)]
)
def test_the_largest_step_depends_on_the_device(
    device_type: str, tokens: int, sequences: int
) -> None:
    assert EngineConfig.create().step_limits(device_type) == (tokens, sequences)


def test_the_largest_step_is_what_was_set() -> None:
    config = EngineConfig.create(max_num_batched_tokens=32, max_num_seqs=100)
    assert config.step_limits("cuda") == (32, 100)


@pytest.mark.parametrize(("name", "value", "sentence"), BAD_VALUES)
def test_a_bad_value_is_one_clear_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert sentence in message
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_a_huge_value_is_not_written_out() -> None:
    with pytest.raises(ConfigError, match=r"not a number of thousands of digits\.$"):
        EngineConfig.create(num_blocks=10**5000)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("blok_size", "block_size"), ("max_num_seq", "max_num_seqs"), ("gpu_memory_utilisation",) * 2],
)
def test_an_unknown_setting_suggests_the_near_miss(typo: str, meant: str) -> None:
    meant = meant.replace("utilisation", "utilization")
    with pytest.raises(ConfigError, match=f"^There is no setting {typo}; did you mean {meant}\\?$"):
        EngineConfig.create(**{typo: 1})


def test_an_unknown_setting_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=r"setting zzz; there are model, device, .*seed"):
        EngineConfig.create(zzz=1)


@pytest.mark.parametrize("value", ["bfloat16", torch.bfloat16])
def test_dtype_by_name_or_as_torch_has_it(value: Any) -> None:
    assert EngineConfig.create(dtype=value).dtype == "bfloat16"


def test_numbers_and_paths_become_plain_values() -> None:
    config = EngineConfig.create(
        model=Path("models/tiny"), block_size=np.int64(32), gpu_memory_utilization=1
    )
    assert config.model == str(Path("models/tiny"))
    assert type(config.block_size) is int
    assert type(config.gpu_memory_utilization) is float


@pytest.mark.parametrize("size", [2**power for power in range(11)])
def test_every_power_of_two_is_a_block_size(size: int) -> None:
    assert EngineConfig.create(block_size=size).block_size == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512MB", 512_000_000),
        ("1.5 KiB", 1536),
        ("2tib", 2 * 2**40),
        ("100", 100),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 gallons", "-1", "1e9", "8G B", True, 1.5, None])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_size(text)


def test_every_setting_says_what_it_is() -> None:
    for setting in dataclasses.fields(EngineConfig):
        assert setting.metadata["help"]
        assert setting.metadata["check"].says


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 32  # type: ignore[misc]
