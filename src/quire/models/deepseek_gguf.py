"""DeepSeek's families in GGUF: V2 and V3 are one architecture there, told apart by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.checkpoints.gguf_architecture import EXPERT_NAMES, GGUFArchitecture

SIGMOID = 2  # of llama.cpp's ways to score experts


def implied(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSeek's config.json says in other words than a file's keys."""
    rope = raw["qk_rope_head_dim"]
    found = {
        "n_routed_experts": raw["num_experts"],
        "num_key_value_heads": raw["num_attention_heads"],  # of latents a file says 1
        "qk_nope_head_dim": raw.get("key_length_mla", raw["head_dim"]) - rope,
        "v_head_dim": raw.get("value_length_mla", raw.get("value_length")),
        "head_dim": rope,
        "q_lora_rank": raw.get("q_lora_rank"),
        # A file that does not say is one without, not one of V3's own numbers.
        "norm_topk_prob": raw.get("norm_topk_prob", False),
        "routed_scaling_factor": raw.get("routed_scaling_factor", 1.0),
        "topk_method": "group_limited_greedy" if raw.get("n_group", 1) > 1 else "greedy",
    }
    if raw.get("expert_gating_func") == SIGMOID:
        found["architectures"] = ["DeepseekV3ForCausalLM"]
        found["num_nextn_predict_layers"] = 0  # converters leave it out
        found |= {"n_group": raw.get("n_group", 1), "topk_group": raw.get("topk_group", 1)}
    if raw.get("yarn_log_multiplier"):  # a tenth of both
        mscale = 10 * raw["yarn_log_multiplier"]
        found["rope_scaling"] = {
            **raw["rope_scaling"],
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return found


DEEPSEEK2 = GGUFArchitecture(
    "deepseek2",
    has_experts=True,
    has_latents=True,
    blocks={
        **EXPERT_NAMES,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj",  # with `attn_v_b`
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    settings={
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length_mla": "key_length_mla",
        "attention.value_length": "value_length",
        "attention.value_length_mla": "value_length_mla",
        "rope.dimension_count": "qk_rope_head_dim",
        "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_gating_func": "expert_gating_func",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    implied=implied,
)
