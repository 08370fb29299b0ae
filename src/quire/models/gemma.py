"""What Gemma 2 and 3 share: scaled embeddings, four norms a layer, windows, and capped logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.activation import Activation
from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.norm import RMSNorm
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block
from quire.models.blocks import GatedMLP, GQAttention
from quire.models.checkpoints.gguf_architecture import WINDOW, GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag, positive_number, whole_number
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder, DecoderForCausalLM

# Fields that `transformers` fills in where a config.json leaves them unsaid, as many do.
DEFAULTS: Raw = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    attention_bias: bool
    query_pre_attn_scalar: float  # scores are divided by its square root
    attention_softcap: float | None
    logit_softcap: float | None


class GemmaForCausalLM(DecoderForCausalLM):
    activation: ClassVar[Activation] = Activation.GELU_TANH
    activation_field: ClassVar[str] = "hidden_activation"

    def __init__(self, config: GemmaConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp, GemmaDecoder(config, tp))
        self.softcap = config.logit_softcap

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)


class GemmaDecoder(Decoder):
    def __init__(self, config: GemmaConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True)
        self.scale = 1.0  # until the type is known that it is rounded to

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        """The scale is a number of the model's type, too: 25.25 in bfloat16 for a width of 640."""
        super().make_room(dtype, device)
        width = self.embed_tokens.shape[1]
        self.scale = torch.tensor(width**0.5, dtype=dtype, device="cpu").item()

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).mul_(self.scale)


class GemmaAttention(GQAttention):
    def __init__(self, config: GemmaConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__(
            config,
            layer,
            tp,
            config.attention_bias,
            config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attention_softcap,
        )


class GemmaLayer(Block):
    """Norms before and behind attention and MLP."""

    def __init__(self, config: GemmaConfig, attention: GemmaAttention, tp: TensorParallel) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, unit_offset=True)

        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, tp, activation=Activation.GELU_TANH)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, stream: Tensor, delta: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        backend = step.backend
        out = self.self_attn(
            self.input_layernorm(stream, delta, backend, self.self_attn), rotation, step
        )
        delta = self.post_attention_layernorm(out, None, backend)
        out = self.mlp(self.pre_feedforward_layernorm(stream, delta, backend, self.mlp), backend)
        normed: Tensor = self.post_feedforward_layernorm(out, None, backend)
        return normed


def gemma_fields(config: ModelConfig, raw: Raw, is_local: tuple[bool, ...]) -> dict[str, Any]:
    """The fields of a `GemmaConfig` without caps; `is_local` says which layers have a window."""
    if flag(raw, "use_bidirectional_attention"):
        raise ModelError(
            "The model's tokens see those after them, too, so it cannot generate text: choose a "
            "model without use_bidirectional_attention."
        )
    window = None
    if raw.get("sliding_window", DEFAULT_WINDOW) is not None:
        window = whole_number(raw, "sliding_window", DEFAULT_WINDOW)
    return {
        **vars(config),
        "windows": tuple(window if local else None for local in is_local),
        "attention_bias": flag(raw, "attention_bias"),
        "query_pre_attn_scalar": positive_number(raw, "query_pre_attn_scalar"),
    }


def softcap(raw: Raw, key: str, unsaid: float | None) -> float | None:
    """`unsaid` is what a config without the field has; null says that there is none."""
    return None if raw.get(key, unsaid) is None else positive_number(raw, key, unsaid)


def gemma_gguf(
    name: str, implied: Callable[[Mapping[str, Any]], Mapping[str, Any]], **settings: str
) -> GGUFArchitecture:
    """What GGUF files of all Gemmas have in common; `settings` are further ones of this family."""
    return GGUFArchitecture(
        name,
        blocks={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        settings={
            WINDOW: "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            **settings,
        },
        implied=implied,
        end_tokens=("<end_of_turn>",),
        unit_offset=True,
    )


def score_scale(layers_of_27b: int, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF files do not have it: it is the width of a head but in the models of 27B, whose number
    of layers llama.cpp knows them by."""
    if raw["num_hidden_layers"] == layers_of_27b:
        return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"]}
    return {"query_pre_attn_scalar": raw["head_dim"]}
