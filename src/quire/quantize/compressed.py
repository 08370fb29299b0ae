"""Four bits as `compressed-tensors` writes them (`pack-quantized`), for other engines to read, too.

weight_packed   int32 [rows, inputs / 8]    eight codes a word, the first in the lowest bits
weight_scale    [rows, groups]
weight_shape    int64 [2]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.kernels.dequantise import pack_nibbles
from quire.models.quantization.names import HEADS

BITS = 4
ANY_LINEAR = ["Linear"]


def tensors_of(name: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """What a layer's `weight` becomes."""
    packed = pack_nibbles(codes).contiguous().view(torch.int32)
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(codes.shape),
    }


def config_of(
    groups: Mapping[str, int], dense: Collection[str], others: Collection[str] = ()
) -> dict[str, Any]:
    """`quantization_config`. `groups`: how many inputs share a scale, by the layer's name; `dense`:
    the layers that are as they were. `others` of these are not of the language model, and
    transformers calls them by longer names than the checkpoint."""
    sizes = sorted(set(groups.values()), reverse=True)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ANY_LINEAR if len(sizes) == 1 else _targets(groups, size),
                "weights": {
                    "num_bits": BITS,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": size,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for i, size in enumerate(sizes)
        },
        "ignore": sorted(
            {HEADS[0], *(f"re:.*{re.escape(name)}$" if name in others else name for name in dense)}
        ),
        "kv_cache_scheme": None,
    }


def _targets(groups: Mapping[str, int], size: int) -> list[str]:
    """Patterns of the layers in groups of this size; names, of a kind that has several sizes."""
    sizes_of: dict[str, set[int]] = {}
    for name, group in groups.items():
        sizes_of.setdefault(_kind(name), set()).add(group)
    kinds = {kind for kind, sizes in sizes_of.items() if sizes == {size}}
    named = [name for name, group in groups.items() if group == size and _kind(name) not in kinds]
    return [*(rf"re:.*\.{kind}$" for kind in sorted(kinds)), *named]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
