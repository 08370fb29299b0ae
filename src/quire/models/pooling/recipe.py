"""A sentence-transformers folder: how hidden states become one vector, and what texts go through.

    modules.json ─► Transformer ─ 1_Pooling ─ 2_Dense ─ 3_Normalize        one folder for each

A folder without modules.json is pooled as its model is commonly used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.checks import shown
from quire.errors import ModelError
from quire.models.checkpoints.json_fields import MOST_FEATURES, Raw, flag, refusal, whole_number
from quire.models.checkpoints.json_file import read_json, read_json_list
from quire.models.checkpoints.safetensors import is_beside
from quire.models.pooling.pooler import MODES

OLD_MODES = {  # as older versions say which: one flag each
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DENSE_ACTIVATIONS = {  # by the names of torch's classes
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}


@dataclass(frozen=True)
class Dense:
    folder: str
    inputs: int
    outputs: int
    bias: bool
    act: str | None  # between this layer and the next


@dataclass(frozen=True)
class Recipe:
    modes: tuple[str, ...]  # of pooling; of several, the vectors are laid end to end
    transformer: str = ""  # the folder that has the model itself
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    yes_and_no: tuple[int, int] | None = None  # tokens whose logits a reranker compares
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_recipe(folder: Path) -> Recipe | None:
    """None if it is not a sentence-transformers folder."""
    if not (folder / "modules.json").is_file():
        return None
    modules = [_Module(folder, entry) for entry in read_json_list(folder / "modules.json")]
    kinds = [module.kind for module in modules]
    if kinds[:1] != ["Transformer"]:
        raise ModelError(
            f"{folder}/modules.json does not begin with a Transformer, and Quire has no other way "
            f"to read a text: choose another model."
        )
    modes: tuple[str, ...] = ()
    dense: list[Dense] = []
    yes_and_no: tuple[int, int] | None = None
    for module in modules[1:]:
        raw = module.config()
        if module.kind == "Pooling":
            modes = _modes(raw)
        elif module.kind == "Dense":
            dense.append(_dense(module.path, raw))
        elif module.kind == "LogitScore":
            yes = whole_number(raw, "true_token_id", least=0)
            yes_and_no = yes, whole_number(raw, "false_token_id", least=0)
        elif module.kind != "Normalize":
            raise ModelError(
                f"{folder}/modules.json has a module {shown(module.kind)}, which Quire does not "
                f"know; it knows Transformer, Pooling, Dense, Normalize and LogitScore."
            )
    transformer = modules[0].config("sentence_bert_config.json")
    told = _json(folder / "config_sentence_transformers.json")
    return Recipe(
        modes=modes,
        transformer=modules[0].path,
        dense=tuple(dense),
        normalize="Normalize" in kinds,
        yes_and_no=yes_and_no,
        max_seq_length=_optional(transformer, "max_seq_length"),
        lower_case=flag(transformer, "do_lower_case"),
        prompts=_prompts(told),
        default_prompt=_default(told),
    )


class _Module:
    def __init__(self, folder: Path, entry: Any) -> None:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise refusal("modules.json", entry, "a list of modules, each with its type")
        self.kind = entry["type"].rpartition(".")[2]
        self.path = entry.get("path", "")
        if not isinstance(self.path, str) or (self.path and not is_beside(self.path)):
            raise refusal("path", self.path, "a folder beside modules.json")
        self.folder = folder / self.path

    def config(self, name: str = "config.json") -> Raw:
        return _json(self.folder / name)


def _json(path: Path) -> Raw:
    return read_json(path) if path.is_file() else {}


def _optional(raw: Raw, key: str) -> int | None:
    return None if raw.get(key) is None else whole_number(raw, key)


def _modes(raw: Raw) -> tuple[str, ...]:
    named = raw.get("pooling_mode")
    found = [mode for old, mode in OLD_MODES.items() if flag(raw, old)]
    if named is not None:
        found = named if isinstance(named, list) else [named]
    if not found or not all(isinstance(mode, str) and mode in MODES for mode in found):
        raise refusal("pooling_mode", found, f"one of {', '.join(MODES)}")
    if not flag(raw, "include_prompt", True):
        raise ModelError(
            "The model's pooling leaves the prompt's tokens out (include_prompt is false), which "
            "Quire does not do: choose another model."
        )
    return tuple(found)


def _dense(folder: str, raw: Raw) -> Dense:
    name = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    if kind not in DENSE_ACTIVATIONS or flag(raw, "use_residual"):
        raise ModelError(
            f"The model's module {folder} has the activation {shown(kind)} or a residual, which "
            f"Quire does not compute; it knows {', '.join(DENSE_ACTIVATIONS)}."
        )
    return Dense(
        folder=folder,
        inputs=whole_number(raw, "in_features", most=MOST_FEATURES),
        outputs=whole_number(raw, "out_features", most=MOST_FEATURES),
        bias=flag(raw, "bias", True),
        act=DENSE_ACTIVATIONS[kind],
    )


def _prompts(raw: Raw) -> dict[str, str]:
    prompts = raw.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in prompts.values()):
        raise refusal("prompts", prompts, "texts by their names")
    return {name: text for name, text in prompts.items() if text}


def _default(raw: Raw) -> str | None:
    name = raw.get("default_prompt_name")
    if name is not None and not isinstance(name, str):
        raise refusal("default_prompt_name", name, "a prompt's name")
    return name
