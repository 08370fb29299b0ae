"""Phi-3 and Phi-4: Llama, with longrope, and in Phi-4-mini heads that turn only in part.

Checkpoints have q, k and v as one tensor, and gate and up as another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.layers.rope import RopeConfig, RotaryEmbedding, rotation_order
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, GQAttention, PreNormLayer
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, whole_number
from quire.models.config import ModelConfig
from quire.models.rope import read_partial_rope, rope_fields

OLD_NAMES = ("su", "yarn")  # of longrope


class Phi3ForCausalLM(CausalLM):
    defaults: ClassVar[Raw] = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    gguf = GGUFArchitecture(
        "phi3",
        blocks={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    )

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        order = rotation_order(config.head_dim, config.rope, neighbours=False)
        for i in range(config.num_layers):
            attention = GQAttention(config, i, tp, order=order)
            self.model.append(PreNormLayer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        rope = dict(rope_fields(raw))
        if (rope.get("rope_type") or rope.get("type")) in OLD_NAMES:
            rope["rope_type"] = "longrope"
        return read_partial_rope({**raw, "rope_parameters": rope}, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        if raw.get("sliding_window") is None:
            return config
        return replace(config, windows=(whole_number(raw, "sliding_window"),) * config.num_layers)
