"""Adapters of random numbers for any model, as `peft` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.layers.tp import TensorParallel
from quire.lora_request import LoRARequest
from quire.models.adapters.targets import Targets
from quire.models.config import ModelConfig

SMALL = 1e-3  # no answer becomes infinite, and hardly one stays the same


def write_adapters(
    folder: Path, model: ModelConfig, count: int, rank: int, dtype: torch.dtype
) -> list[LoRARequest]:
    """So many, each for all matrices of the layers but those of experts."""
    linear = Targets(model, TensorParallel()).linear
    return [
        LoRARequest(f"dummy-{i}", i, str(_write(folder / str(i), linear, i, rank, dtype)))
        for i in range(1, count + 1)
    ]


def _write(
    folder: Path, linear: dict[str, tuple[int, ...]], seed: int, rank: int, dtype: torch.dtype
) -> Path:
    folder.mkdir()
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in linear.items():
        for part, shape in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            values = torch.empty(shape, dtype=dtype).uniform_(-SMALL, SMALL, generator=noise)
            tensors[f"base_model.model.{name}.{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(linear),
        "base_model_name_or_path": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
