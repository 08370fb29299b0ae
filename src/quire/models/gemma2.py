"""Gemma 2: a window in every other layer, and caps on scores and logits."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.checkpoints.json_fields import Raw
from quire.models.config import ModelConfig
from quire.models.gemma import (
    DEFAULTS,
    GemmaAttention,
    GemmaConfig,
    GemmaForCausalLM,
    GemmaLayer,
    gemma_fields,
    gemma_gguf,
    score_scale,
    softcap,
)
from quire.models.layer_windows import patterned_layers

PATTERN = 2  # every other layer sees all of a text


class Gemma2ForCausalLM(GemmaForCausalLM):
    defaults: ClassVar[Raw] = {
        **DEFAULTS,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    }
    gguf = gemma_gguf("gemma2", implied=partial(score_scale, 46))

    def __init__(self, config: GemmaConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            self.model.append(GemmaLayer(config, GemmaAttention(config, i, tp), tp), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> GemmaConfig:
        is_local = patterned_layers(config.num_layers, raw, PATTERN)
        return GemmaConfig(
            **gemma_fields(config, raw, is_local),
            attention_softcap=softcap(raw, "attn_logit_softcapping", 50.0),
            logit_softcap=softcap(raw, "final_logit_softcapping", 30.0),
        )
