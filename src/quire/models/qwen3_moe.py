"""Qwen3-MoE: Qwen3, with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.layers.rope import RotaryEmbedding
from quire.layers.router import RoutingRule
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, PreNormLayer
from quire.models.checkpoints.gguf_architecture import EXPERT_NAMES, GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.experts_fields import read_experts
from quire.models.layer_windows import window_size
from quire.models.qwen3 import Qwen3Attention, Qwen3Config
from quire.models.sparse import SparseLayer, SparseMLP


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    norm_topk_prob: bool


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    gguf = GGUFArchitecture(
        "qwen3moe",
        has_experts=True,
        blocks=EXPERT_NAMES,
        settings={"expert_feed_forward_length": "moe_intermediate_size"},
        implied=lambda raw: {"norm_topk_prob": True},
    )

    def __init__(self, config: Qwen3MoeConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        assert config.experts is not None
        rope = RotaryEmbedding(config.head_dim, config.rope)
        rule = RoutingRule(config.experts.top_k, renormalised=config.norm_topk_prob, rounded=True)
        for i, has_experts in enumerate(config.experts.layers):
            attention = Qwen3Attention(config, i, tp)
            if has_experts:
                experts = SparseMLP(config, config.experts, rule, tp)
                self.model.append(SparseLayer(config, attention, experts), rope)
            else:
                self.model.append(PreNormLayer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Qwen3MoeConfig:
        """One window for all layers, if there is one."""
        windows = (window_size(raw),) * config.num_layers
        experts = read_experts(raw, config.num_layers)
        return Qwen3MoeConfig(
            **vars(replace(config, experts=experts, windows=windows)),
            attention_bias=flag(raw, "attention_bias"),
            norm_topk_prob=flag(raw, "norm_topk_prob"),
        )
