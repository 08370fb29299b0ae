"""Mistral: Llama, with every layer seeing through a sliding window if there is one."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, whole_number
from quire.models.config import ModelConfig

UNSAID_WINDOW = 4096  # of the first Mistral; later ones say null


class MistralForCausalLM(CausalLM):
    gguf = GGUFArchitecture("mistral", pairs_side_by_side=True)

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            layer = PreNormLayer(config, GQAttention(config, i, tp), GatedMLP(config, tp))
            self.model.append(layer, rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        if "sliding_window" in raw and raw["sliding_window"] is None:
            return config
        window = whole_number(raw, "sliding_window", UNSAID_WINDOW)
        return replace(config, windows=(window,) * config.num_layers)
