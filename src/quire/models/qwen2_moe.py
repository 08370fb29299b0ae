"""Qwen2-MoE: Qwen2, with experts, and one beside them that all tokens go through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.layers.rope import RotaryEmbedding
from quire.layers.router import RoutingRule
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.checkpoints.gguf_architecture import EXPERT_NAMES, GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag, whole_number
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.experts_fields import read_experts
from quire.models.layer_windows import layer_kinds, window_size
from quire.models.sparse import SparseLayer, SparseMLP


@dataclass(frozen=True)
class Qwen2MoeConfig(ModelConfig):
    qkv_bias: bool
    norm_topk_prob: bool


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
    gguf = GGUFArchitecture(
        "qwen2moe",
        has_experts=True,
        blocks={
            **EXPERT_NAMES,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        settings={
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        implied=lambda raw: {"qkv_bias": raw["attention_bias"]},
    )

    def __init__(self, config: Qwen2MoeConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        assert config.experts is not None
        rope = RotaryEmbedding(config.head_dim, config.rope)
        rule = RoutingRule(config.experts.top_k, renormalised=config.norm_topk_prob, rounded=True)
        for i, has_experts in enumerate(config.experts.layers):
            attention = GQAttention(config, i, tp, qkv_bias=config.qkv_bias)
            if has_experts:
                experts = SparseMLP(config, config.experts, rule, tp)
                self.model.append(SparseLayer(config, attention, experts), rope)
            else:
                self.model.append(PreNormLayer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Qwen2MoeConfig:
        shared = "shared_expert_intermediate_size"
        experts = read_experts(raw, config.num_layers, shared_features=shared)
        config = replace(config, experts=experts, windows=windows(config.num_layers, raw))
        return Qwen2MoeConfig(
            **vars(config),
            qkv_bias=flag(raw, "qkv_bias", True),
            norm_topk_prob=flag(raw, "norm_topk_prob"),
        )


def windows(num_layers: int, raw: Raw) -> tuple[int | None, ...]:
    """By `layer_types`, or in every other of the layers below `max_window_layers`."""
    size = window_size(raw)
    last = whole_number(raw, "max_window_layers", 28, least=0)
    has_window = layer_kinds(num_layers, raw) or [
        i % 2 == 0 and i < last for i in range(num_layers)
    ]
    return tuple(size if windowed else None for windowed in has_window)
