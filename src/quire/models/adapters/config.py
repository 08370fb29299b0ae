"""What adapter_config.json says: which modules an adapter changes, and by how much.

What would change results and is not computed here is refused by name. That goes for fields that a
later `peft` may add, too: one that is not known must be off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.checks import Check, apply_checks, flag, number, setting, shown, whole, whole_number
from quire.errors import ModelError
from quire.models.adapters.patterns import first_matches
from quire.models.checkpoints.json_file import read_json

CONFIG = "adapter_config.json"
MOST_RANK = 256
MOST_ALPHA = 1e6
MOST_PATTERNS = 4096
MOST_PATTERN_CHARS = 16 * 1024
ALL_LINEAR = "all-linear"
PLAIN_NAME = re.compile(r"[\w.]+")

# Where an adapter comes from and how it was trained, which changes nothing once it is.
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# These initialisations change the base model's own weights, too.
CHANGES_BASE = re.compile(r"(pissa|corda|olora|loftq|lora_ga)", re.IGNORECASE)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(value)
    return tuple(value)


def _name_list() -> Check:
    return Check("a list of names", _names)


def _names_or_pattern() -> Check:
    def accept(value: Any) -> tuple[str, ...] | str:
        if not isinstance(value, str):
            return _names(value)
        if len(value) > MOST_PATTERN_CHARS:
            raise ValueError(value)
        return value

    says = f"a list of names, or a pattern of up to {MOST_PATTERN_CHARS:,} characters"
    return Check(says, accept)


def _by_pattern(says: str, check: Check) -> Check:
    def accept(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_PATTERNS:
            raise TypeError(value)
        if any(len(pattern) > MOST_PATTERN_CHARS for pattern in value):
            raise ValueError(value)
        return {pattern: check.accept(each) for pattern, each in value.items()}

    return Check(f"an object of up to {MOST_PATTERNS:,} patterns, each with {says}", accept)


def _layer_indices() -> Check:
    def accept(value: Any) -> frozenset[int]:
        every = value if isinstance(value, list | tuple) else [value]
        return frozenset(whole(each, 0, 1 << 20) for each in every)

    return Check("a layer's index, or a list of them", accept)


def _layer_names() -> Check:
    def accept(value: Any) -> tuple[str, ...]:
        every = _names([value] if isinstance(value, str) else value)
        if not all(PLAIN_NAME.fullmatch(name) for name in every):
            raise ValueError(value)
        return every

    return Check("the name of a list of layers, or several, of letters, digits and dots", accept)


def _no_bias() -> Check:
    def accept(value: Any) -> str:
        if value != "none":
            raise ValueError(value)
        return "none"

    return Check('"none", since Quire keeps the biases of the base model', accept)


def _initialisation() -> Check:
    def accept(value: Any) -> Any:
        if isinstance(value, str) and CHANGES_BASE.match(value):
            raise ValueError(value)
        return value

    says = (
        "one that leaves the base model as it is: save the adapter with peft's "
        "path_initial_model_for_weight_conversion"
    )
    return Check(says, accept)


@dataclass(frozen=True)
class AdapterConfig:
    r: int = setting(8, whole_number(1, MOST_RANK), "Rank of the matrices A and B.")
    lora_alpha: float = setting(8, number(-MOST_ALPHA, MOST_ALPHA), "What the scale is r times.")
    use_rslora: bool = setting(False, flag(), "The scale is alpha / sqrt(r), not alpha / r.")
    rank_pattern: Mapping[str, int] = setting(
        None, _by_pattern("a rank", whole_number(1, MOST_RANK)), "Ranks of some modules."
    )
    alpha_pattern: Mapping[str, float] = setting(
        None, _by_pattern("a number", number(-MOST_ALPHA, MOST_ALPHA)), "Alphas of some modules."
    )
    target_modules: tuple[str, ...] | str | None = setting(
        None, _names_or_pattern(), "Ends of modules' names, a pattern of names, or all-linear."
    )
    exclude_modules: tuple[str, ...] | str | None = setting(
        None, _names_or_pattern(), "Modules that are none of these, in the same way."
    )
    layers_to_transform: frozenset[int] | None = setting(
        None, _layer_indices(), "The only layers whose modules are, where the names are a list."
    )
    layers_pattern: tuple[str, ...] | None = setting(
        None, _layer_names(), "What the list of layers is called; else any."
    )
    target_parameters: tuple[str, ...] | None = setting(
        None, _name_list(), "Ends of parameters' names: those of experts, which are stacked."
    )
    lora_bias: bool = setting(False, flag(), "B has a bias.")
    modules_to_save: tuple[str, ...] | None = setting(
        None, _name_list(), "Modules that are replaced as a whole: the embedding, the head."
    )
    bias: str = setting("none", _no_bias(), "Which biases of the base model were trained.")
    init_lora_weights: bool | str | None = setting(
        None, _initialisation(), "What training began with."
    )

    def __post_init__(self) -> None:
        apply_checks(self, ModelError)

    def scale(self, rank: int, alpha: float) -> float:
        """What the product of B and A is multiplied with."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def ranks(self, names: Iterable[str]) -> dict[str, int]:
        """The rank of each of these modules or parameters."""
        return by_name(self.rank_pattern or {}, names, self.r)

    def alphas(self, names: Iterable[str]) -> dict[str, float]:
        return by_name(self.alpha_pattern or {}, names, self.lora_alpha)

    def replaces(self, module: str) -> bool:
        return ends_with_one_of(module, set(self.modules_to_save or ()))

    def targets(self, modules: Iterable[str], ends: set[str]) -> dict[str, str]:
        """Those of these modules that are changed, each with the name that patterns of ranks and
        alphas go by; embedding and head (`ends`) are not among "all linear" modules."""
        names = sorted(set(modules))
        changed = self._selected(names, ends) - named(self.exclude_modules or (), names)
        found = {name: name for name in changed if not self.replaces(name)}
        return found | {name: f"{name}.weight" for name in names if self.reaches(f"{name}.weight")}

    def reaches(self, parameter: str) -> bool:
        """Whether it is one of the `target_parameters`."""
        return ends_with_one_of(parameter, set(self.target_parameters or ()))

    def _selected(self, names: list[str], ends: set[str]) -> set[str]:
        modules = self.target_modules or ()
        if isinstance(modules, str):
            return set(names) - ends if modules.lower() == ALL_LINEAR else named(modules, names)
        return {name for name in named(modules, names) if name in modules or self._has_layer(name)}

    def _has_layer(self, name: str) -> bool:
        """Whether it is in one of the layers, if only some are changed."""
        if not self.layers_to_transform:
            return True
        before = [rf"(?:^|.*?\.){re.escape(each)}" for each in self.layers_pattern or ()]
        tried = (re.match(rf"{each}\.(\d+)\.", name) for each in before or [r".*?\.[^.]*"])
        found = next(filter(None, tried), None)
        return found is not None and int(found[1]) in self.layers_to_transform


def named(modules: tuple[str, ...] | str, names: list[str]) -> set[str]:
    """Those that a pattern matches, or whose ends are in a list."""
    if isinstance(modules, str):
        return set(first_matches([modules], names)) if modules else set()
    ends = set(modules)
    return {name for name in names if ends_with_one_of(name, ends)}


def ends_with_one_of(name: str, ends: set[str]) -> bool:
    """Whether the whole name, or what is behind one of its dots, is one of them."""
    parts = name.split(".")
    return any(".".join(parts[start:]) in ends for start in range(len(parts)))


def by_name(patterns: Mapping[str, Any], names: Iterable[str], default: Any) -> dict[str, Any]:
    names = list(names)
    found = first_matches(list(patterns), names, after_dot=True) if patterns else {}
    return {name: patterns[found[name]] if name in found else default for name in names}


def read_adapter_config(folder: Path) -> AdapterConfig:
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no {CONFIG}, so it is not an adapter of peft's.")
    raw = read_json(folder / CONFIG)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder} is an adapter of type {shown(kind)}: Quire has only LORA.")
    known = {field.name for field in fields(AdapterConfig)}
    for name in sorted(raw.keys() - known - HARMLESS):
        if raw[name] not in (None, False, 0, "", [], {}):
            raise ModelError(
                f"{folder} was made with {shown(name)}={shown(raw[name])}, which Quire does not "
                f"compute: train it without, or merge it into its base model with peft's "
                f"merge_and_unload."
            )
    try:
        return AdapterConfig(**{name: raw[name] for name in raw.keys() & known})
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG} cannot be used: {error}") from None
