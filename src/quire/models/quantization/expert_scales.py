"""fp8 experts as `transformers` 5 writes them: one tensor has the scales of all experts of a layer.

    …experts.gate_up_proj_scale_inv    [experts, blocks of gate and, below them, of up, blocks]
    …experts.down_proj_scale_inv       [experts, blocks, blocks]

Codes are one tensor for each matrix of an expert, or (`save_original_format=False`) are stacked as
their scales are. Weights that blocks do not divide stay numbers, and have scales that mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.weights import FLOATS
from quire.models.checkpoints.json_fields import MOST_EXPERTS
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import Inner, RowSlice
from quire.models.quantization.checkpoint import matrix_rows

ENDING = "_scale_inv"
OF_ALL = re.compile(rf"(.*\.experts)\.(gate_up_proj|down_proj){ENDING}")
# What experts by themselves call the matrices whose scales are one: most families, and Mixtral.
PARTS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}

Tensors = Mapping[str, LazyTensor]


def scales_beside_codes(tensors: Tensors, block_rows: int | None) -> Tensors:
    """All tensors, codes of experts and their scales each by itself, and numbers without scales."""
    found = dict(tensors)
    for name, scales in tensors.items():
        stacked = OF_ALL.fullmatch(name)
        if stacked is None or len(scales.shape) != 3 or scales.shape[0] > MOST_EXPERTS:
            continue
        experts, matrix = stacked.groups()
        replaced = (
            _of_stacked(tensors, name, block_rows)
            if f"{experts}.{matrix}" in tensors
            else _of_single(tensors, experts, matrix, block_rows)
        )
        if replaced is not None:
            del found[name]
            found.pop(f"{experts}.{matrix}", None)
            found |= replaced
    return {name: tensor for name, tensor in found.items() if not _is_beside_numbers(name, found)}


def _of_stacked(tensors: Tensors, name: str, block_rows: int | None) -> Tensors:
    """Of each expert, where codes are stacked, too."""
    together = name.removesuffix(ENDING)
    experts, _, matrix = together.rpartition(".")
    codes, scales = tensors[together], tensors[name]
    if codes.dtype != torch.float8_e4m3fn:
        return {together: codes}
    if len(codes.shape) != 3 or codes.shape[0] != scales.shape[0]:
        _refuse_shape(name, scales, f"those of {shorten(together)}, {list(codes.shape[:4])}")
    parts = len(PARTS[matrix])
    _check_blocks(name, scales, [codes.shape[1] // parts] * parts, block_rows)
    found: dict[str, LazyTensor] = {}
    for i in range(scales.shape[0]):
        found[f"{experts}.{i}.{matrix}.weight"] = Inner(codes, i)
        found[f"{experts}.{i}.{matrix}.weight{ENDING}"] = Inner(scales, i)
    return found


def _of_single(
    tensors: Tensors, experts: str, matrix: str, block_rows: int | None
) -> Tensors | None:
    """Of each expert, where each has codes of its own; None: none has."""
    name = f"{experts}.{matrix}{ENDING}"
    scales = tensors[name]
    count = scales.shape[0]
    by_expert = [_matrices(tensors, f"{experts}.{i}", matrix) for i in range(count + 1)]
    if not any(by_expert):
        return None
    if not by_expert[count - 1] or by_expert[count]:
        _refuse_shape(name, scales, "those of as many experts as there are")
    found: dict[str, LazyTensor] = {}
    for i, layers in enumerate(by_expert):
        codes = {f"{layer}.weight": tensors[f"{layer}.weight"] for layer in layers}
        if not codes or any(each.dtype in FLOATS for each in codes.values()):
            continue
        heights = [matrix_rows(called, each) for called, each in codes.items()]
        _check_blocks(name, scales, heights, block_rows)
        above = 0
        for layer, height in zip(layers, heights, strict=True):
            blocks = scales.shape[1] if block_rows is None else -(-height // block_rows)
            found[f"{layer}.weight{ENDING}"] = RowSlice(Inner(scales, i), above, blocks)
            above += 0 if block_rows is None else blocks
    return found


def _matrices(tensors: Tensors, expert: str, matrix: str) -> Sequence[str]:
    """What the checkpoint calls the matrices of an expert whose scales are one; all, or none."""
    layers = [
        f"{expert}.{called}"
        for part in PARTS[matrix]
        for called in part
        if f"{expert}.{called}.weight" in tensors
    ]
    return layers if len(layers) == len(PARTS[matrix]) else ()


def _check_blocks(
    name: str, scales: LazyTensor, heights: Sequence[int], block_rows: int | None
) -> None:
    """Whether the scales are those of matrices with so many rows, one below the other."""
    if block_rows is None:
        return
    if len(heights) > 1 and heights[0] % block_rows:
        raise ModelError(
            f"{shorten(name)} has scales of blocks of {block_rows:,} rows, and gate and up, of "
            f"{heights[0]:,} each, meet within one: quantise the model in smaller blocks, or use "
            f"its original weights."
        )
    blocks = sum(-(-height // block_rows) for height in heights)
    if scales.shape[1] != blocks:
        _refuse_shape(name, scales, f"those of {blocks:,} blocks of {block_rows:,} rows")


def _refuse_shape(name: str, scales: LazyTensor, wanted: str) -> None:
    raise ModelError(
        f"{shorten(name)} is {list(scales.shape)}, not {wanted}: download the model again."
    )


def _is_beside_numbers(name: str, tensors: Tensors) -> bool:
    """Whether these are scales of a matrix that is numbers: `transformers` takes it as it is."""
    if not name.endswith(ENDING):
        return False
    matrix = tensors.get(name.removesuffix(ENDING))
    return matrix is not None and matrix.dtype in FLOATS
