"""Qwen2: Llama, with a bias on q, k and v, and sliding windows in the layers that ask for one."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ModelError
from quire.models.checkpoints.json_fields import Raw, flag, refusal, whole_number
from quire.models.config import ModelConfig
from quire.models.llama import DecoderForCausalLM

KINDS = ("full_attention", "sliding_attention")


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        return replace(config, attention_bias=True, windows=layer_windows(config.num_layers, raw))


def layer_windows(num_layers: int, raw: Raw) -> tuple[int | None, ...]:
    """Windows by `layer_types`, or in the layers from `max_window_layers` up."""
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window", 0) is None:
        return (None,) * num_layers
    window = whole_number(raw, "sliding_window", 4096)
    kinds = raw.get("layer_types")
    if kinds is None:
        full = whole_number(raw, "max_window_layers", 28, least=0)
        return tuple(None if i < full else window for i in range(num_layers))
    if not isinstance(kinds, list) or not all(kind in KINDS for kind in kinds):
        raise refusal("layer_types", kinds, f"a list of {' and '.join(KINDS)}")
    if len(kinds) != num_layers:
        raise ModelError(
            f"The model's config has {len(kinds):,} layer_types for {num_layers:,} layers: "
            f"download it again."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
