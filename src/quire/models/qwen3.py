"""Qwen3: Llama, with each head of q and k normalised before it is rotated."""

from __future__ import annotations

from dataclasses import replace

from quire.models.checkpoints.json_fields import MOST_HEAD_FEATURES, Raw, flag, whole_number
from quire.models.config import ModelConfig
from quire.models.llama import DecoderForCausalLM
from quire.models.qwen2 import layer_windows


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        bias = flag(raw, "attention_bias")
        return replace(
            config,
            head_dim=whole_number(raw, "head_dim", 128, most=MOST_HEAD_FEATURES),
            attention_bias=bias,
            output_bias=bias,
            qk_norm=True,
            windows=layer_windows(config.num_layers, raw),
        )
