"""Llama, and what is built like it, such as SmolLM2."""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on what follows the attention
    mlp_bias: bool


class LlamaForCausalLM(CausalLM):
    gguf = GGUFArchitecture("llama", pairs_side_by_side=True)

    def __init__(self, config: LlamaConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            attention = GQAttention(config, i, tp, config.attention_bias, config.output_bias)
            mlp = GatedMLP(config, tp, config.mlp_bias)
            self.model.append(PreNormLayer(config, attention, mlp), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> LlamaConfig:
        bias = flag(raw, "attention_bias")
        return LlamaConfig(
            **vars(config),
            attention_bias=bias,
            output_bias=flag(raw, "attention_output_bias", bias),
            mlp_bias=flag(raw, "mlp_bias"),
        )
