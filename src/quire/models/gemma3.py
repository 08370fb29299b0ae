"""Gemma 3: norms over the heads of q and k, and windows with a rotation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.layers.norm import HeadNorm
from quire.layers.rope import RopeConfig, RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, mapping, token_ids, whole_number
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
from quire.models.rope import read_rope

PATTERN = 6  # every sixth layer sees all of a text


@dataclass(frozen=True)
class Gemma3Config(GemmaConfig):
    is_local: tuple[bool, ...]  # of each layer: whether it is of the kind that has a window
    local_rope: RopeConfig  # of local layers; `rope` is that of the others

    by_layer: ClassVar[tuple[str, ...]] = (*ModelConfig.by_layer, "is_local")


def implied_by_gguf(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file without a window has no local layers."""
    pattern = PATTERN if raw.get("sliding_window") else 1
    return {**score_scale(62, raw), "sliding_window_pattern": pattern}


class Gemma3ForCausalLM(GemmaForCausalLM):
    defaults: ClassVar[Raw] = {
        **DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
    gguf: ClassVar[GGUFArchitecture | None] = gemma_gguf(
        "gemma3", implied_by_gguf, **{"rope.freq_base_swa": "rope_local_base_freq"}
    )

    def __init__(self, config: Gemma3Config, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        local_rope = RotaryEmbedding(config.head_dim, config.local_rope)
        for i, is_local in enumerate(config.is_local):
            layer = GemmaLayer(config, Gemma3Attention(config, i, tp), tp)
            self.model.append(layer, local_rope if is_local else rope)

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        """The rotation of full layers: `rope_parameters` has one for each kind of layer."""
        of_kind = mapping(mapping(raw, "rope_parameters"), "full_attention")
        return read_rope({**raw, "rope_parameters": of_kind}, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Gemma3Config:
        pattern = whole_number(raw, "sliding_window_pattern", PATTERN)
        is_local = patterned_layers(config.num_layers, raw, pattern)
        of_kind = mapping(mapping(raw, "rope_parameters"), "sliding_attention")
        of_kind = {"rope_theta": raw["rope_local_base_freq"], **of_kind}
        local = {**raw, "rope_scaling": None, "rope_parameters": of_kind}
        return Gemma3Config(
            **gemma_fields(config, raw, is_local),
            attention_softcap=None,  # which `transformers` does not apply in this family either
            logit_softcap=softcap(raw, "final_logit_softcapping", None),
            is_local=is_local,
            local_rope=read_rope(local, config.head_dim),
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model out of a checkpoint that also sees pictures."""

    gguf = None  # whose files have the language model alone

    @classmethod
    def text_config(cls, raw: Raw) -> Raw:
        nested = mapping(raw, "text_config")
        ends = [*token_ids(raw, "eos_token_id"), *token_ids(nested, "eos_token_id")]
        both = {**raw, **nested, "eos_token_id": ends or None}
        if raw.get("tie_word_embeddings") is not None:
            both["tie_word_embeddings"] = raw["tie_word_embeddings"]
        return both

    def text_tensor(self, name: str) -> str | None:
        """Names are as `transformers` 4 and 5 write them."""
        if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
            return None
        if name.startswith("model.language_model."):
            return "model." + name.removeprefix("model.language_model.")
        return name.removeprefix("language_model.")


class Gemma3Attention(GemmaAttention):
    def __init__(self, config: Gemma3Config, layer: int, tp: TensorParallel) -> None:
        super().__init__(config, layer, tp)
        heads, kv_heads, _ = (size // config.head_dim for size in self.qkv.sizes)
        self.qk_norm = HeadNorm(
            heads, kv_heads, config.head_dim, config.rms_norm_eps, unit_offset=True
        )
