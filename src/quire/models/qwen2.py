"""Qwen2: Llama, with a bias on q, k and v, and sliding windows in the layers that ask for one."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw
from quire.models.config import ModelConfig
from quire.models.layer_windows import layer_windows


class Qwen2ForCausalLM(CausalLM):
    gguf = GGUFArchitecture("qwen2")

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            attention = GQAttention(config, i, tp, qkv_bias=True)
            self.model.append(PreNormLayer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        return replace(config, windows=layer_windows(config.num_layers, raw))
