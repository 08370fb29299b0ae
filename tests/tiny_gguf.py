"""A small model as a GGUF file, written as converters do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from gguf_codes import SCALES, random_codes
from torch import Tensor

from quire.models.checkpoints.gguf_architecture import BLOCK_NAMES, TOP_NAMES, GGUFArchitecture
from quire.models.hf_config import read_hf_config
from quire.models.registry import GGUF_FAMILIES
from quire.models.source import shapes

OUR_TOP = {theirs: ours for ours, theirs in TOP_NAMES.items()}


SHAPE: dict[str, Any] = {
    "vocab_size": 101,  # which two ranks do not share evenly
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_at_random(
    folder: Path,
    name: str,
    type_: Type,
    other_types: dict[str, Type] | None = None,
    **changes: Any,
) -> Path:
    """A model of `SHAPE` whose weights are of one type, but those that have another."""
    torch.manual_seed(3)
    raw = {"architectures": [f"{name}ForCausalLM"], **SHAPE, **changes}
    weights = shapes(read_hf_config(raw)).weights()
    tensors = {weight.name: 0.2 * torch.randn(weight.shape) for weight in weights}
    return write_gguf(folder / "model.gguf", raw, tensors, type_, other_types)


def write_gguf(
    path: Path,
    raw: dict[str, Any],
    tensors: Mapping[str, Tensor],
    type_: Type = Type.F32,
    other_types: Mapping[str, Type] | None = None,
) -> Path:
    """`raw` is its config.json; `tensors` and `other_types`, of some of them, have the names of a
    Hugging Face checkpoint. Types that the `gguf` package cannot make have random codes."""
    architecture = raw["architectures"][0].removesuffix("ForCausalLM").lower()
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * raw.get("partial_rotary_factor", 1)))
    for name, tensor in tensors.items():
        stored = _stored_name(name, GGUF_FAMILIES[architecture, False][1])
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.numpy())
        else:
            kind = (other_types or {}).get(name, type_)
            writer.add_tensor(stored, _encoded(tensor, kind, stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encoded(tensor: Tensor, kind: Type, name: str) -> np.ndarray:
    if kind.name in SCALES:
        return random_codes(kind, *tensor.shape, seed=zlib.crc32(name.encode()))
    return quantize(tensor.numpy(), kind)


def _stored_name(name: str, names: GGUFArchitecture) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        blocks = {theirs: ours for ours, theirs in {**BLOCK_NAMES, **names.blocks}.items()}
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{blocks[part]}.{kind}"
    return f"{OUR_TOP[stem]}.{kind}"
