"""Granite 3: Llama, with multipliers on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.adapted_product import Delta
from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag, positive_number
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, DecoderForCausalLM


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float  # which logits are divided by


class GraniteForCausalLM(DecoderForCausalLM):
    gguf = GGUFArchitecture(
        "granite",
        pairs_side_by_side=True,
        settings={
            "embedding_scale": "embedding_multiplier",
            "attention.scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    )

    def __init__(self, config: GraniteConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp, GraniteDecoder(config, tp))
        self.logits_scaling = config.logits_scaling
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            self.model.append(GraniteLayer(config, i, tp), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> GraniteConfig:
        return GraniteConfig(
            **vars(config),
            attention_bias=flag(raw, "attention_bias"),
            mlp_bias=flag(raw, "mlp_bias"),
            embedding_multiplier=positive_number(raw, "embedding_multiplier", 1.0),
            attention_multiplier=positive_number(raw, "attention_multiplier", 1.0),
            residual_multiplier=positive_number(raw, "residual_multiplier", 1.0),
            logits_scaling=positive_number(raw, "logits_scaling", 1.0),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).div_(self.logits_scaling)


class GraniteDecoder(Decoder):
    def __init__(self, config: GraniteConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.multiplier = config.embedding_multiplier

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).mul_(self.multiplier)


class GraniteLayer(PreNormLayer):
    def __init__(self, config: GraniteConfig, layer: int, tp: TensorParallel) -> None:
        bias, scale = config.attention_bias, config.attention_multiplier
        attention = GQAttention(config, layer, tp, bias, bias, scale)
        super().__init__(config, attention, GatedMLP(config, tp, config.mlp_bias))
        self.multiplier = config.residual_multiplier

    def forward(
        self, stream: Tensor, delta: Delta | None, rotation: Rotation, step: Step
    ) -> Tensor:
        backend = step.backend
        out: Tensor = self.self_attn(
            self.input_layernorm(stream, delta, backend, self.self_attn), rotation, step
        )
        delta = out.mul_(self.multiplier)
        out = self.mlp(self.post_attention_layernorm(stream, delta, backend, self.mlp), backend)
        return out.mul_(self.multiplier)
