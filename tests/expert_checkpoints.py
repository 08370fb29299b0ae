"""The experts of a model of `transformers`, which has them fused, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


def gate_and_up_apart(tensors: Mapping[str, Tensor]) -> Named:
    """All experts of a layer in one tensor still: what is behind `.experts.` has three matrices."""
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield f"{stem}{part}.weight", rows.contiguous()
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def deinterleaved(tensors: Mapping[str, Tensor]) -> Named:
    """As `gate_and_up_apart`, of gpt-oss, where gate and up take turns, and inputs come first."""
    for name, tensor in tensors.items():
        stem, dot, parameter = name.rpartition(".experts.")
        if not dot:
            yield name, tensor
            continue
        is_bias = parameter.endswith("_bias")
        matrix, ending = parameter.removesuffix("_bias"), "bias" if is_bias else "weight"
        rows = tensor if is_bias else tensor.mT
        if matrix == "gate_up_proj":
            yield f"{stem}.experts.gate_proj.{ending}", rows[:, 0::2].contiguous()
            yield f"{stem}.experts.up_proj.{ending}", rows[:, 1::2].contiguous()
        else:
            yield f"{stem}.experts.{matrix}.{ending}", rows.contiguous()


def one_by_one(tensors: Mapping[str, Tensor]) -> Named:
    """Each expert has its own."""
    for name, tensor in gate_and_up_apart(tensors):
        if ".experts." in name:
            stem, _, matrix = name.partition(".experts.")
            for expert, each in enumerate(tensor):
                yield f"{stem}.experts.{expert}.{matrix}", each.contiguous()
        else:
            yield name, tensor


def fused(tensors: Mapping[str, Tensor], like: Iterable[str]) -> dict[str, Tensor]:
    """The inverse of `one_by_one`, for a model whose tensors have these names."""
    return {name: tensors[name] if name in tensors else _fused(tensors, name) for name in like}


def _fused(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    stem, matrix = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    count = sum(each.startswith(f"{stem}.") and f".{parts[0]}." in each for each in tensors)
    experts = [[tensors[f"{stem}.{i}.{part}.weight"] for part in parts] for i in range(count)]
    return torch.stack([torch.cat(matrices) for matrices in experts])


def as_mixtral(name: str) -> str:
    """What its checkpoints call it."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name
