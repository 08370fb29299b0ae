"""gpt-oss: experts with biases and a clamped gate, learned sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from quire.kernels.activation import ClampedSwiGLU
from quire.layers.attention import Step
from quire.layers.experts import ExpertNames, Experts
from quire.layers.norm import RMSNorm
from quire.layers.rope import RopeConfig, RotaryEmbedding
from quire.layers.router import Router, RoutingRule, Scores
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GQAttention
from quire.models.checkpoints.gguf_architecture import EXPERT_NAMES, WINDOW, GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag, positive_number, whole_number
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.experts_fields import read_experts
from quire.models.layer_windows import patterned_layers
from quire.models.rope import read_rope
from quire.models.sparse import RoutedMLP, SparseLayer

NAMES = ExpertNames(interleaved=True)
PATTERN = 2  # every other layer sees all of a text
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


@dataclass(frozen=True)
class GptOssConfig(ModelConfig):
    attention_bias: bool
    gate: ClampedSwiGLU


class GptOssForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
    }
    transposed_experts = True
    gguf = GGUFArchitecture(
        "gpt-oss",
        has_experts=True,
        blocks={
            **EXPERT_NAMES,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        settings={WINDOW: "sliding_window"},
        implied=lambda raw: {"rope_scaling": {**raw["rope_scaling"], "truncate": False}},
        end_tokens=("<|return|>", "<|call|>"),
    )

    def __init__(self, config: GptOssConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            attention = GQAttention(
                config, i, tp, config.attention_bias, config.attention_bias, sinks=True
            )
            self.model.append(SparseLayer(config, attention, GptOssMLP(config, tp)), rope)
        for norm in self.modules():
            if isinstance(norm, RMSNorm):
                norm.in_float32 = True

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        is_said = raw.get("rope_scaling") or raw.get("rope_parameters")
        return read_rope(raw if is_said else {**raw, "rope_scaling": YARN}, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> GptOssConfig:
        experts = read_experts(raw, config.num_layers, features="intermediate_size")
        has_window = patterned_layers(config.num_layers, raw, PATTERN)
        window = whole_number(raw, "sliding_window", 128)
        windows = tuple(window if each else None for each in has_window)
        return GptOssConfig(
            **vars(replace(config, experts=experts, windows=windows)),
            attention_bias=flag(raw, "attention_bias", True),
            gate=ClampedSwiGLU(
                alpha=positive_number(raw, "swiglu_alpha", 1.702),
                limit=positive_number(raw, "swiglu_limit", 7.0),
            ),
        )


class GptOssMLP(RoutedMLP):
    """A router and its experts; the parts' names are those of checkpoints."""

    def __init__(self, config: GptOssConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape, hidden = config.experts, config.hidden_size
        assert shape is not None
        self.tp = tp
        rule = RoutingRule(shape.top_k, Scores.NONE, rounded=True)
        self.router = Router(hidden, shape.count, rule, bias=True)
        self.experts = Experts(
            hidden, shape.features, shape.count, tp, NAMES, config.gate, bias=True
        )

    @property
    def chooser(self) -> Router:
        return self.router

    def forward(self, x: Tensor, step: Step, products: Tensor | None = None) -> Tensor:
        return self.tp.all_reduce(self._partial(x, step, products))

    def _partial(self, x: Tensor, step: Step, products: Tensor | None) -> Tensor:
        """What this rank adds to the sum. Kernels for a few tokens choose their experts as well,
        which saves a launch."""
        of_few = self.router.products_of_few(x, step, products)
        if of_few is not None:
            found = self.experts.choosing(x, of_few, step.backend)
            if found is not None:
                return found
            products = of_few.numbers
        out: Tensor = self.experts(x, self.router(x, step, products), step.backend)
        return out
