"""GGUF files of tiny models in all families, as converters write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from expert_checkpoints import as_mixtral, deinterleaved, gate_and_up_apart
from families import GGUF_PERMUTED, causal_lm
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

Writes = Callable[[gguf.GGUFWriter], None]
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def write(path: Path, *parts: Writes, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for part in parts:
        part(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_model(family: str, extra: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, causal_lm(family))(config)
    for parameter in model.parameters():  # norms and biases too
        torch.nn.init.normal_(parameter)
    return model


def permuted(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """What converters do to q and k of llama models, as llama.cpp writes it."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint, but for experts, which converters put together."""
    if model.config.model_type == "gpt_oss":
        return dict(deinterleaved(model.state_dict()))
    tensors = dict(gate_and_up_apart(model.state_dict()))
    if model.config.model_type == "mixtral":
        return {as_mixtral(name): tensor for name, tensor in tensors.items()}
    return tensors


def model_parts(
    model: Any,
    architecture: str,
    gates: Type | None = None,
    experts: Type | None = None,
    apart: bool = False,
) -> Writes:
    """`gates`: the type of routers and of the shared expert's gate, which then is a matrix.
    `apart`: each expert has tensors of its own, as converters wrote Mixtral at first."""
    config = model.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = numbers.get(architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def parts(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        head_dim = model.model.layers[0].self_attn.head_dim
        if head_dim != config.hidden_size // config.num_attention_heads:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)  # Gemma 3's other one is the same in all files
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
            for kind in ("long", "short"):
                factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)
        if architecture == "granite":
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        if architecture == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0):
            writer.add_expert_count(count)
            writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if getattr(config, "sliding_window", None):
            writer.add_sliding_window(config.sliding_window)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id)
        for name, tensor in tensors_of(model).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if architecture in GGUF_PERMUTED and ".q_proj." in name:
                tensor = permuted(tensor, config.num_attention_heads)
            if architecture in GGUF_PERMUTED and ".k_proj." in name:
                tensor = permuted(tensor, config.num_key_value_heads)
            if architecture.startswith("gemma") and name.endswith("norm.weight"):
                tensor = tensor + 1
            if "shared_expert_gate" in name and gates is None:
                tensor = tensor.squeeze(0)
            if name.endswith(".sinks"):
                name += ".weight"
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            if experts is not None and "_exps" in found:
                codes = quantize(tensor.numpy(), experts)
                of_each = [(found.replace("_exps", f".{i}"), each) for i, each in enumerate(codes)]
                for called, stored in of_each if apart else [(found, codes)]:
                    writer.add_tensor(called, stored, raw_dtype=experts)
            elif gates is not None and "ffn_gate_inp" in found:
                writer.add_tensor(found, quantize(tensor.numpy(), gates), raw_dtype=gates)
            else:
                writer.add_tensor(found, tensor.numpy())

    return parts
