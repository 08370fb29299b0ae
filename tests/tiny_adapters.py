"""Adapters for the model of `tiny_llm`, as `peft` writes them, with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_llm import CONFIG

from quire import LoRARequest


def sizes(model: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices that are adapted."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    heads = model["num_attention_heads"]
    width = model.get("head_dim", hidden // heads)
    kv = width * model["num_key_value_heads"]
    return {
        "self_attn.q_proj": (width * heads, hidden),
        "self_attn.v_proj": (kv, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_adapter(
    folder: Path, seed: int, rank: int = 4, model: dict[str, Any] = CONFIG, **changes: Any
) -> Path:
    """One that changes most answers; `model` is its base model's config."""
    folder.mkdir(exist_ok=True, parents=True)
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (rows, columns) in sizes(model).items():
            where = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(rank, columns, generator=noise)
            tensors[f"{where}.lora_B.weight"] = torch.randn(rows, rank, generator=noise)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.partition(".")[2] for name in sizes(model)],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def adapters(folder: Path, count: int, model: dict[str, Any] = CONFIG) -> list[LoRARequest]:
    """So many, each with a folder of its own."""
    return [
        LoRARequest(f"n{i}", i + 1, str(write_adapter(folder / f"n{i}", seed=i, model=model)))
        for i in range(count)
    ]
