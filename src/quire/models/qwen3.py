"""Qwen3: Llama, with each head of q and k normalised before it is rotated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.layers.norm import HeadNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig
from quire.models.layer_windows import layer_windows


@dataclass(frozen=True)
class Qwen3Config(ModelConfig):
    attention_bias: bool


class Qwen3ForCausalLM(CausalLM):
    defaults: ClassVar[Raw] = {"head_dim": 128}
    gguf = GGUFArchitecture("qwen3")

    def __init__(self, config: Qwen3Config, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            layer = PreNormLayer(config, Qwen3Attention(config, i, tp), GatedMLP(config, tp))
            self.model.append(layer, rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Qwen3Config:
        config = replace(config, windows=layer_windows(config.num_layers, raw))
        return Qwen3Config(**vars(config), attention_bias=flag(raw, "attention_bias"))


class Qwen3Attention(GQAttention):
    def __init__(self, config: Qwen3Config, layer: int, tp: TensorParallel) -> None:
        super().__init__(config, layer, tp, config.attention_bias, config.attention_bias)
        heads, kv_heads, _ = (size // config.head_dim for size in self.qkv.sizes)
        self.qk_norm = HeadNorm(heads, kv_heads, config.head_dim, config.rms_norm_eps)
