"""OLMo 2: norms behind attention and MLP instead of before them, and over all of q and all of k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.codes import Activations
from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.linear import ColumnLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Layer, TensorPlace, Weight, parameter, sibling, span
from quire.models.blocks import GatedMLP, GQAttention
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig
from quire.models.decoder import DecoderForCausalLM


@dataclass(frozen=True)
class Olmo2Config(ModelConfig):
    attention_bias: bool


class Olmo2ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[Raw] = {"rms_norm_eps": 1e-5}
    gguf = GGUFArchitecture(
        "olmo2",
        blocks={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    )

    def __init__(self, config: Olmo2Config, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        rope = RotaryEmbedding(config.head_dim, config.rope)
        for i in range(config.num_layers):
            self.model.append(Olmo2Layer(config, i, tp), rope)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> Olmo2Config:
        return Olmo2Config(**vars(config), attention_bias=flag(raw, "attention_bias"))


class Olmo2Layer(Block):
    def __init__(self, config: Olmo2Config, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, layer, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, tp)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, stream: Tensor, delta: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        if delta is not None:
            stream.add_(delta)
        attended = self.self_attn(stream, rotation, step)
        stream.add_(self.post_attention_layernorm(attended, None, step.backend))
        out: Tensor = self.mlp(stream, step.backend)
        normed: Tensor = self.post_feedforward_layernorm(out, None, step.backend)
        return normed


class Olmo2Attention(GQAttention):
    def __init__(self, config: Olmo2Config, layer: int, tp: TensorParallel) -> None:
        super().__init__(config, layer, tp, config.attention_bias, config.attention_bias)
        self.norm = WholeWidthNorm(self.qkv, config.rms_norm_eps, tp)

    def heads(self, x: Activations, rotation: Rotation, step: Step) -> Tensor:
        found: Tensor = self.attend(self.norm(self.qkv(x)), None, rotation, step)
        return found.flatten(1)


class WholeWidthNorm(Layer):
    """An RMS norm over all heads of q, and one over all of k; the ranks' squares must meet."""

    def __init__(self, qkv: ColumnLinear, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.sizes, self.parts = qkv.sizes, qkv.parts[:2]
        self.whole = [output.features for output in qkv.outputs[:2]]
        self.weight = parameter(sum(self.sizes[:2]))

    def forward(self, qkv: Tensor) -> Tensor:
        """`[tokens, features]` of q, k and v; q and k are normalised in place."""
        q, k, _ = qkv.split(self.sizes, dim=-1)
        squares = torch.cat([x.float().square().sum(-1, keepdim=True) for x in (q, k)], dim=-1)
        squares = self.tp.all_reduce(squares)
        for i, (x, weight) in enumerate(zip((q, k), self._weights(), strict=True)):
            # Ranks that share a KV head count it once each, so the count is of all ranks' parts.
            mean = squares[:, i : i + 1] / (self.tp.size * x.shape[1])
            x.copy_(x.float() * torch.rsqrt(mean + self.eps) * weight)
        return qkv

    def weights(self, path: str) -> Iterator[Weight]:
        names = ("q_norm.weight", "k_norm.weight")
        places = zip(names, self.whole, self._weights(), self.parts, strict=True)
        for name, size, place, part in places:
            yield Weight(sibling(path, name), (size,), TensorPlace(place), (span(part),))

    def _weights(self) -> tuple[Tensor, Tensor]:
        q, k = self.sizes[:2]
        return self.weight[:q], self.weight[q : q + k]
