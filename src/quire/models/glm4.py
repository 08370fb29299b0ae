"""GLM-4 (0414, dense): norms before and behind each block, and neighbours turn in half a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quire.kernels.adapted_product import Delta
from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.norm import RMSNorm
from quire.layers.rope import RopeConfig, RotaryEmbedding, rotation_order
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.rope import read_partial_rope


@dataclass(frozen=True)
class Glm4Config(ModelConfig):
    attention_bias: bool  # on q, k and v


class Glm4ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-7,
    }
    gguf = GGUFArchitecture(
        "glm4",
        blocks={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    )

    def __init__(self, config: Glm4Config, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        order = rotation_order(config.head_dim, config.rope, neighbours=True)
        for i in range(config.num_layers):
            attention = GQAttention(config, i, tp, config.attention_bias, order=order)
            self.model.append(Glm4Layer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        return read_partial_rope(raw, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Glm4Config:
        return Glm4Config(**vars(config), attention_bias=flag(raw, "attention_bias"))


class Glm4Layer(PreNormLayer):
    def __init__(self, config: Glm4Config, attention: GQAttention, mlp: GatedMLP) -> None:
        super().__init__(config, attention, mlp)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, stream: Tensor, delta: Delta | None, rotation: Rotation, step: Step
    ) -> Tensor:
        backend = step.backend
        out = self.self_attn(
            self.input_layernorm(stream, delta, backend, self.self_attn), rotation, step
        )
        delta = self.post_self_attn_layernorm(out, None, backend)
        out = self.mlp(self.post_attention_layernorm(stream, delta, backend, self.mlp), backend)
        normed: Tensor = self.post_mlp_layernorm(out, None, backend)
        return normed
