"""A model of three small layers with random weights, opened in seconds on any device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire import LLM

VOCAB = 199
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def open_tiny(folder: Path, where: str, **settings: Any) -> LLM:
    """`where` is a device; behind `cpu-overlapped`, steps overlap as they do on a GPU."""
    device, _, overlapped = where.partition("-")
    basics = {"load_format": "dummy", "dtype": "float32", "device": device, "use_tqdm": False}
    llm = LLM(str(folder), **basics | settings)
    llm.engine.overlap |= bool(overlapped)
    return llm


def ids(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + salt) % VOCAB for i in range(length)]
