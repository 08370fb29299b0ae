"""Every engine setting, said once: its name, type, default, help and check.

`LLM(...)` keywords, command-line flags and help texts are all made from the fields of
`EngineConfig`, and every value passes its field's check however it came in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from quire.errors import ConfigError

INT32_MAX = 2**31 - 1  # ids, lengths and slots of a step travel as int32
UINT64_MAX = 2**64 - 1

SIZE_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(["", "K", "M", "G", "T"])},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(["K", "M", "G", "T"], start=1)},
}


class Check(NamedTuple):
    """What a setting may be, in words, and the function that normalises it or raises ValueError."""

    says: str
    accept: Callable[[Any], Any]
    choices: tuple[str, ...] = ()
    is_size: bool = False


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name that looks most like `name`, if any does."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def parse_size(value: Any) -> int:
    """Bytes from an int, or from text such as `8GiB`, `512MB` or `1.5 TiB`."""
    if not isinstance(value, str):
        return _whole(value)
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", value.strip())
    units = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(value)
    bytes_per_unit: int = units[found[2].lower()]
    return round(float(found[1]) * bytes_per_unit)


def _whole(value: Any) -> int:
    # Anything with __index__ is an integer (numpy's too); bool has one, but is a slip here.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(value)
    return int(value)


def _within(value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError(value)
    return value


def _whole_number(low: int, high: int) -> Check:
    says = f"a whole number from {low:,} to {high:,}"
    return Check(says, lambda value: _within(_whole(value), low, high))


def _power_of_two(low: int, high: int) -> Check:
    def accept(value: Any) -> int:
        number: int = _within(_whole(value), low, high)
        if number & (number - 1):
            raise ValueError(value)
        return number

    return Check(f"a power of two from {low} to {high}", accept)


def _fraction() -> Check:
    def accept(value: Any) -> float:
        if isinstance(value, (bool, str)):
            raise ValueError(value)
        number = float(value)
        if not 0 < number <= 1:  # false for NaN as well
            raise ValueError(value)
        return number

    return Check("a number above 0 and at most 1", accept)


def _one_of(*choices: str) -> Check:
    def accept(value: Any) -> str:
        name = str(value).removeprefix("torch.")  # torch.float32 the object is "float32" too
        if name not in choices:
            raise ValueError(value)
        return name

    return Check(f"one of {', '.join(choices)}", accept, choices)


def _flag() -> Check:
    def accept(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(value)
        return value

    return Check("True or False", accept)


def _text(says: str) -> Check:
    def accept(value: Any) -> str:
        text = os.fspath(value)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(value)
        return text

    return Check(says, accept)


def _size() -> Check:
    return Check(
        "a size in bytes such as 8GiB, 512MB or 0",
        lambda value: _within(parse_size(value), 0, UINT64_MAX),
        is_size=True,
    )


def _setting(default: Any, check: Check, help: str, *, built: bool = True) -> Any:
    return field(default=default, metadata={"check": check, "help": help, "built": built})


_COUNT = _whole_number(1, INT32_MAX)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of one engine; None stands for "decided from the model and the device"."""

    model: str = _setting(
        "smollm2",
        _text("a model's name or path"),
        "built-in name, Hugging Face folder or repository, or GGUF file",
    )
    device: str = _setting("auto", _one_of("auto", "cpu", "cuda"), "where the model runs")
    dtype: str = _setting(
        "auto",
        _one_of("auto", "float32", "bfloat16", "float16"),
        "type of weights and activations; auto follows the checkpoint and the hardware",
    )
    load_format: str = _setting(
        "auto",
        _one_of("auto", "dummy"),
        "dummy makes random weights of the model's shape, for benchmarks",
    )
    max_model_len: int | None = _setting(
        None,
        _COUNT,
        "most tokens in one sequence (default: the model's, if the pool holds it)",
    )
    max_num_batched_tokens: int | None = _setting(
        None, _COUNT, "most tokens in one step (default: 16,384 on a GPU, 2,048 on a CPU)"
    )
    max_num_seqs: int | None = _setting(
        None, _COUNT, "most sequences in one step (default: 512 on a GPU, 64 on a CPU)"
    )
    block_size: int = _setting(16, _power_of_two(1, 1024), "tokens in one block of the KV cache")
    num_blocks: int | None = _setting(
        None, _COUNT, "blocks in the pool (default: sized from free memory)"
    )
    gpu_memory_utilization: float = _setting(
        0.9, _fraction(), "share of the GPU's memory that Quire may use"
    )
    kv_cache_dtype: str = _setting(
        "auto",
        _one_of("auto", "fp8"),
        "type of cached KV; auto is the model's",
        built=False,
    )
    enable_prefix_caching: bool = _setting(
        True, _flag(), "keep finished blocks and share common prefixes"
    )
    scheduling_policy: str = _setting(
        "fcfs", _one_of("fcfs", "priority", "cache-aware"), "who goes first when not all fit"
    )
    enforce_eager: bool = _setting(False, _flag(), "run every step without CUDA graphs")
    tensor_parallel_size: int = _setting(
        1, _whole_number(1, 1024), "devices that share one model", built=False
    )
    seed: int = _setting(
        0, _whole_number(0, UINT64_MAX), "seeds the requests that bring no seed of their own"
    )
    speculative: str | None = _setting(
        None, _text("ngram or a model's name"), "drafter: ngram, or a smaller model", built=False
    )
    num_speculative_tokens: int | None = _setting(
        None, _whole_number(1, 64), "tokens drafted ahead of each step", built=False
    )
    host_cache_bytes: int = _setting(0, _size(), "host memory for evicted blocks", built=False)
    ssd_cache_dir: str | None = _setting(
        None, _text("one folder, or several with commas"), "folders of the SSD cache", built=False
    )
    ssd_cache_bytes: int | None = _setting(None, _size(), "room of the SSD cache", built=False)
    remote_cache_url: str | None = _setting(
        None, _text("an address such as redis://host:6379"), "shared remote cache", built=False
    )

    @classmethod
    def create(cls, **settings: Any) -> EngineConfig:
        """As the constructor, but an unknown name is a ConfigError that suggests the near miss."""
        known = [setting.name for setting in fields(cls)]
        for name in settings:
            if name not in known:
                mend = did_you_mean(name, known) or f"; the settings are {', '.join(known)}."
                raise ConfigError(f"There is no setting {name}{mend}")
        return cls(**settings)

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if value is None and setting.default is None:
                continue
            check: Check = setting.metadata["check"]
            try:
                accepted = check.accept(value)
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"{name} must be {check.says}, not {value!r}.") from None
            if not setting.metadata["built"] and accepted != setting.default:
                raise ConfigError(f"{name}={value} is not built yet; leave it out.")
            object.__setattr__(self, name, accepted)

    def resolve(self, device_type: str) -> EngineConfig:
        """These settings with the defaults that depend on the device filled in."""
        tokens, sequences = (16_384, 512) if device_type == "cuda" else (2_048, 64)
        return replace(
            self,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
            max_num_seqs=self.max_num_seqs or sequences,
        )
