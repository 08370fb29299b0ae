"""Mistral: Llama, with every layer seeing through a sliding window if there is one."""

from __future__ import annotations

from dataclasses import replace

from quire.models.checkpoints.json_fields import Raw, whole_number
from quire.models.config import ModelConfig
from quire.models.llama import DecoderForCausalLM

UNSAID_WINDOW = 4096  # of the first Mistral; later ones say null


class MistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        if "sliding_window" in raw and raw["sliding_window"] is None:
            return config
        window = whole_number(raw, "sliding_window", UNSAID_WINDOW)
        return replace(config, windows=(window,) * config.num_layers)
