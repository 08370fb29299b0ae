"""SmolLM3: Llama, in which every fourth layer knows nothing of positions (NoPE)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.layers.rope import NO_ROPE, RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag, refusal, whole_number
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_windows import layer_kinds, window_size


@dataclass(frozen=True)
class SmolLM3Config(ModelConfig):
    attention_bias: bool
    mlp_bias: bool
    has_rope: tuple[bool, ...]  # of each layer

    by_layer: ClassVar[tuple[str, ...]] = (*ModelConfig.by_layer, "has_rope")


class SmolLM3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {"tie_word_embeddings": True, "rope_theta": 2e6}
    gguf = GGUFArchitecture("smollm3", pairs_side_by_side=True)

    def __init__(self, config: SmolLM3Config, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        no_rope = RotaryEmbedding(config.head_dim, NO_ROPE)
        for i in range(config.num_layers):
            attention = GQAttention(config, i, tp, config.attention_bias, config.attention_bias)
            layer = PreNormLayer(config, attention, GatedMLP(config, tp, config.mlp_bias))
            self.model.append(layer, rope if config.has_rope[i] else no_rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> SmolLM3Config:
        """Only layers without positions may have a window, unless `layer_types` says which do."""
        has_rope = layers_with_rope(config.num_layers, raw)
        window = window_size(raw)
        has_window = layer_kinds(config.num_layers, raw) or [not rope for rope in has_rope]
        windows = tuple(window if windowed else None for windowed in has_window)
        return SmolLM3Config(
            **vars(replace(config, windows=windows)),
            attention_bias=flag(raw, "attention_bias"),
            mlp_bias=flag(raw, "mlp_bias"),
            has_rope=has_rope,
        )


def layers_with_rope(num_layers: int, raw: Raw) -> tuple[bool, ...]:
    """By `no_rope_layers`, which is 1 for a layer that has it; else by `no_rope_layer_interval`."""
    given = raw.get("no_rope_layers")
    if given is None:
        interval = whole_number(raw, "no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or not all(v in (0, 1) for v in given)
    ):
        raise refusal("no_rope_layers", given, f"a list of 0 and 1 for {num_layers:,} layers")
    return tuple(bool(value) for value in given[:num_layers])
