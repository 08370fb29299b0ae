"""A tiny model with weights of its own, of which every rank loads a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_llm import write_config

from quire import LLM
from quire.models.source import open_model

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def write_weights(folder: Path, **changes: Any) -> Path:
    """Eight heads and two KV heads: two ranks have one each, and of four ranks two share one."""
    write_config(folder, **SHAPE | changes)
    source = open_model(str(folder), "dummy")
    save_file(dict(source.tensors()), str(folder / "model.safetensors"))
    return folder


def open_ranks(folder: Path, size: int, **settings: Any) -> LLM:
    basics = {"dtype": "float32", "device": "cpu", "use_tqdm": False, "block_size": 8}
    return LLM(str(folder), tensor_parallel_size=size, **basics | settings)
