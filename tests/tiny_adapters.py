"""Adapters for the model of `tiny_llm`, as `peft` writes them, with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_llm import CONFIG

from quire import LoRARequest

SIZES = {"q_proj": (48, 48), "v_proj": (16, 48), "gate_proj": (96, 48), "down_proj": (48, 96)}


def write_adapter(folder: Path, seed: int, rank: int = 4, **changes: Any) -> Path:
    """One that changes most answers."""
    folder.mkdir(exist_ok=True, parents=True)
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (rows, columns) in SIZES.items():
            part = "self_attn" if name in ("q_proj", "v_proj") else "mlp"
            where = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(rank, columns, generator=noise)
            tensors[f"{where}.lora_B.weight"] = torch.randn(rows, rank, generator=noise)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(SIZES),
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def adapters(folder: Path, count: int) -> list[LoRARequest]:
    """So many, each with a folder of its own."""
    return [
        LoRARequest(f"n{i}", i + 1, str(write_adapter(folder / f"n{i}", seed=i)))
        for i in range(count)
    ]
