"""Mixtral: Mistral, with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.layers.experts import ExpertNames
from quire.layers.rope import RotaryEmbedding
from quire.layers.router import RoutingRule
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GQAttention
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, whole_number
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.experts_fields import read_experts
from quire.models.sparse import SparseLayer, SparseMLP

MOE = "block_sparse_moe"
NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    }
    gguf = GGUFArchitecture(
        "llama",
        pairs_side_by_side=True,
        has_experts=True,
        blocks={
            "ffn_gate_inp": f"{MOE}.gate",
            "ffn_gate_exps": f"{MOE}.experts.{NAMES.gate}",
            "ffn_up_exps": f"{MOE}.experts.{NAMES.up}",
            "ffn_down_exps": f"{MOE}.experts.{NAMES.down}",
        },
    )

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        assert config.experts is not None
        rope = RotaryEmbedding(config.head_dim, config.rope)
        rule = RoutingRule(config.experts.top_k, renormalised=True)
        for i in range(config.num_layers):
            experts = SparseMLP(config, config.experts, rule, tp, NAMES)
            self.model.append(SparseLayer(config, GQAttention(config, i, tp), experts, MOE), rope)

    def text_tensor(self, name: str) -> str:
        """`transformers` 5 calls the router and its experts as other families do."""
        return name.replace(".mlp.", f".{MOE}.").replace(".down_proj.", f".{NAMES.down}.")

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        experts = read_experts(raw, config.num_layers, features="intermediate_size")
        config = replace(config, experts=experts)
        if raw.get("sliding_window") is None:
            return config
        window = whole_number(raw, "sliding_window")
        return replace(config, windows=(window,) * config.num_layers)
