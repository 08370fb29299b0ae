"""Tiny models of every family, and what `transformers` makes of them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from mxfp4_experts import make_experts, write_experts
from torch import Tensor

PROMPT, DECODED = 60, 10
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# Heads of q and k with 8 features that do not turn and 4 that do, of v with 10.
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GROUPED = {"n_group": 4, "topk_group": 2}
MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 16.0],
}
# The gate's limit is so low that many numbers reach it.
GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "swiglu_limit": 0.7,
    "rope_parameters": {**YARN, "rope_theta": 150_000.0, "truncate": False},
}
IN_MXFP4 = ("gpt-oss-mxfp4",)  # whose experts are, as in published checkpoints

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}},
    ),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-rope-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral-window-1": ("Mistral", {"sliding_window": 1}),
    "mistral-wide-window": ("Mistral", {"sliding_window": 64}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2-window": ("Qwen2", WINDOWED),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-window": ("Qwen3", {"head_dim": 16, **WINDOWED}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 16,
            **WINDOWED,
            "layer_types": LOCAL_AND_GLOBAL,
        },
    ),
    "phi3-window": ("Phi3", {"sliding_window": 9}),
    "phi3-partial-short": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 256,
        },
    ),
    "phi3-partial-long": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 6}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-no-bias": ("Glm4", {"head_dim": 8, "attention_bias": False, "num_key_value_heads": 6}),
    # Caps so low that scores and logits reach them, windows of which the text has several.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-renormalised": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            **WINDOWED,
            "max_window_layers": 3,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "head_dim": 8,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, **GROUPED, "q_lora_rank": 20, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "rope_parameters": MSCALE},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, **GROUPED, "q_lora_rank": 20}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": MSCALE,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-no-bias": ("GptOss", {**GPT_OSS, "attention_bias": False, "num_experts_per_tok": 1}),
    "gpt-oss-mxfp4": ("GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 128}),
    "gemma3-wide-heads": (
        "Gemma3Text",
        {"head_dim": 256, "sliding_window": 9, "layer_types": LOCAL_AND_GLOBAL},
    ),
}

# A case or two of each family, and the windows of its KV groups.
GROUPS: dict[str, tuple[int | None, ...]] = {
    "gemma2": (None, 7, 7),
    "gemma3": (None, 7, 7),
    "mistral-window": (9,),
    "phi3-window": (9,),
    "qwen2-window": (None, 7, 7),
    "smollm3-window": (None, 7),
    "phi3-partial-long": (None,),
    "olmo2": (None,),
    "smollm3": (None,),
    "granite": (None,),
    "glm4": (None,),
    "mixtral": (None,),
    "qwen2-moe-renormalised": (None, 7, 7),
    "qwen3-moe-some-dense": (7,),
    "deepseek-v2": (None,),
    "deepseek-v2-lite": (None,),
    "deepseek-v3": (None,),
    "gpt-oss": (None, 7, 7),
    "gpt-oss-mxfp4": (None, 7, 7),
}

# Of these, the mixtures of experts.
MIXTURES = [case for case in GROUPS if case.startswith(("mixtral", "qwen", "deepseek", "gpt-oss"))]
MIXTURES.remove("qwen2-window")

# As converters write them: the architecture in GGUF, in transformers, and its settings.
GGUF_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", "Llama", {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-linear": (
        "llama",
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral-as-llama": ("llama", "Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("mistral", "Mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2-yarn": (
        "qwen2",
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3-window": ("phi3", "Phi3", {"sliding_window": 9}),
    "phi3-longrope": (
        "phi3",
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
                "factor": 4.0,
                "attention_factor": 1.125,
            },
            "original_max_position_embeddings": 128,
        },
    ),
    "mixtral": (
        "llama",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": None},
    ),
    "qwen2-moe": ("qwen2moe", "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("qwen3moe", "Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "smollm3": ("smollm3", "SmolLM3", {"tie_word_embeddings": True}),
    "granite": (
        "granite",
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 8.0,
        },
    ),
    "glm4": ("glm4", "Glm4", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
# Whose converters change the order of rows.
GGUF_PERMUTED = ("llama", "mistral", "smollm3", "granite")

# Whose tensors are dealt out to ranks; and those that their checkpoints have in one.
SHARDED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {"partial_rotary_factor": 0.75},
    "Olmo2": {},
    "SmolLM3": {"tie_word_embeddings": False},
    "Glm4": {"partial_rotary_factor": 0.5},
    "Gemma2": {"query_pre_attn_scalar": 16},
    "Gemma3": {"query_pre_attn_scalar": 16},
}

FUSED = {"Phi3ForCausalLM": ("qkv_proj", "gate_up_proj"), "Glm4ForCausalLM": ("gate_up_proj",)}


def causal_lm(name: str) -> str:
    """The class of models whose configs are `<name>Config`."""
    return f"{name.removesuffix('Text')}ForCausalLM"


def from_transformers(*names: str) -> list[Any]:
    """Its classes; what they import stays, so no LLM that closes has to search it for garbage."""
    import transformers

    before = len(sys.modules)
    found = [getattr(transformers, name) for name in names]
    if len(sys.modules) > before:
        gc.freeze()
    return found


class Oracle:
    """A random model saved by transformers, and its logits for a random text."""

    def __init__(self, case: str, folder: Path, **more: Any) -> None:
        name, changes = CASES[case]
        config_class, model_class = from_transformers(f"{name}Config", causal_lm(name))
        # Some versions leave Gemma 2's cap out of every other attention than this.
        own = {"attn_implementation": "eager"}
        config = config_class(**{**SHAPE, **own, **changes, **more})
        torch.manual_seed(len(case))
        model = model_class(config).eval()
        with torch.no_grad():
            for tensor, parameter in model.named_parameters():
                # Norms begin as ones and biases as zeros: hide nothing.
                if parameter.dim() == 1 or tensor.endswith("_bias"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            for module in model.modules():
                if hasattr(module, "limit"):  # which some versions leave at its default
                    module.limit = config.swiglu_limit
            stored = make_experts(model) if case in IN_MXFP4 else {}
            self.ids = torch.randint(0, SHAPE["vocab_size"], (PROMPT + DECODED,)).tolist()
            self.logits = model(torch.tensor([self.ids])).logits[0]
        model.save_pretrained(folder)
        if stored:
            write_experts(folder, stored)
        self.model, self.folder = model, folder

    def check(self, logits: Tensor, start: int) -> None:
        wanted = self.logits[start : start + len(logits)]
        torch.testing.assert_close(logits.cpu(), wanted, atol=1e-4, rtol=0)
