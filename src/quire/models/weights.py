"""Copying a checkpoint into a model, and saying exactly what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.weights import Weight

if TYPE_CHECKING:
    from quire.models.llama import CausalLM

HARMLESS = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints carry what is computed anyway
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES_SHOWN = 8


@dataclass
class Misfits:
    """Names that keep a checkpoint from being a model's."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def refuse(self, architecture: str) -> None:
        lists = ("missing", self.missing), ("unexpected", self.unexpected), ("unfit", self.unfit)
        if found := "; ".join(f"{what}: {shorten(names)}" for what, names in lists if names):
            raise ModelError(
                f"The weights are not those of the {architecture} that the config describes "
                f"({found})."
            )


def copy_weights(model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill all of `model`'s weights from `tensors`, in whatever order they come."""
    wanted = {weight.name: weight for weight in model.weights()}
    filled: set[str] = set()
    misfits = Misfits()
    for name, tensor in tensors:
        weight = wanted.get(name)
        if weight is None:
            if not HARMLESS.search(name):
                misfits.unexpected.append(name)
            continue
        if problem := misfit(weight, tensor):
            misfits.unfit.append(problem)
        elif weight.identity not in filled:
            weight.load(tensor)
        elif not weight.holds(tensor):
            misfits.unfit.append(f"{name} differs from the tensor it is tied to")
        filled.add(weight.identity)
    misfits.missing = sorted({w.identity for w in wanted.values()} - filled)
    misfits.refuse(model.config.architecture)


def misfit(weight: Weight, tensor: Tensor) -> str | None:
    """Why `tensor` cannot be this weight, with its name."""
    if tuple(tensor.shape) != weight.shape:
        return f"{weight.name} is {list(tensor.shape)}, not {list(weight.shape)}"
    if tensor.dtype not in FLOATS:
        return f"{weight.name} is {str(tensor.dtype).removeprefix('torch.')}"
    return None


def shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
