"""Adapters of random numbers for any model, as `peft` writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.layers.tp import TensorParallel
from quire.lora_request import LoRARequest
from quire.models.adapters.targets import Targets
from quire.models.config import ModelConfig

SHIFT = 64  # numbers, from where one adapter begins to where the next does
SMALL = 1e-3  # no answer becomes infinite, and hardly one stays the same


def write_adapters(
    folder: Path, model: ModelConfig, count: int, rank: int, dtype: torch.dtype
) -> Iterator[LoRARequest]:
    """So many, each for all matrices of the layers but those of experts.

    Random numbers take longer to draw than to write. So they are drawn once, and each adapter has
    them from another place on.
    """
    linear = Targets(model, TensorParallel()).linear
    size = rank * sum(map(sum, linear.values()))
    noise = torch.empty(size + count * SHIFT, dtype=dtype)
    noise.uniform_(-SMALL, SMALL, generator=torch.Generator().manual_seed(0))
    for i in range(1, count + 1):
        path = _write(folder / str(i), linear, noise[i * SHIFT :], rank)
        yield LoRARequest(f"dummy-{i}", i, str(path))


def _write(folder: Path, linear: dict[str, tuple[int, ...]], noise: Tensor, rank: int) -> Path:
    folder.mkdir()
    tensors, used = {}, 0
    for name, (rows, columns) in linear.items():
        for part, shape in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            values = noise[used : used + math.prod(shape)]
            tensors[f"base_model.model.{name}.{part}.weight"] = values.view(shape)
            used += len(values)
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
