"""A model of `transformers` with experts in MXFP4, in the tensors of gpt-oss's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
PARTS = ("gate_up_proj", "down_proj")
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def make_experts(model: Any) -> dict[str, Tensor]:
    """Give a model experts of random codes, which `transformers` dequantises; their tensors."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        for part in PARTS:
            numbers = getattr(layer.mlp.experts, part)
            experts, inputs, outputs = numbers.shape
            groups = (experts, outputs, inputs // GROUP)
            blocks = torch.randint(0, 256, (*groups, GROUP // 2), dtype=torch.uint8)
            scales = torch.randint(122, 125, groups, dtype=torch.uint8)
            numbers.copy_(convert_moe_packed_tensors(blocks, scales, dtype=numbers.dtype))
            name = f"model.layers.{i}.mlp.experts.{part}"
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return stored


def write_experts(folder: Path, stored: dict[str, Tensor]) -> None:
    """Replace those of a checkpoint, which has them as numbers."""
    file, config = folder / "model.safetensors", folder / "config.json"
    kept = {name: t for name, t in load_file(file).items() if not name.endswith(PARTS)}
    save_file(kept | stored, file)
    fields = json.loads(config.read_text()) | {"quantization_config": QUANTIZATION}
    config.write_text(json.dumps(fields))
