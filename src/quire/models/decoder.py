"""A decoder over a residual stream and its head: what all families have around their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.embedding import Vocabulary
from quire.layers.norm import RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Layer, Weight
from quire.models.causal_lm import CausalLM
from quire.models.config import ModelConfig


class Decoder(Block):
    """From token ids to the last norm; a family appends its layers, each with its rotation."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ropes: list[RotaryEmbedding] = []
        self._rope_of_layer: list[int] = []

    def append(self, layer: Block, rope: RotaryEmbedding) -> None:
        """Layers that share a `rope` share what it computes in each step."""
        if rope not in self.ropes:
            self.ropes.append(rope)
        self._rope_of_layer.append(self.ropes.index(rope))
        self.layers.append(layer)

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the residual stream begins with: a new tensor, which blocks add to."""
        return self.embed_tokens.embed(token_ids)

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        return self.run_layers(*self.enter(token_ids, positions, step), step)

    def enter(
        self, token_ids: Tensor, positions: Tensor, step: Step
    ) -> tuple[Tensor, list[Rotation]]:
        """What the layers begin with: the residual stream, and the rotations of its tokens."""
        stream = self.embed(token_ids)
        limit, dtype = step.max_context_len, stream.dtype
        return stream, [rope(positions, limit, dtype) for rope in self.ropes]

    def run_layers(self, stream: Tensor, rotations: Sequence[Rotation], step: Step) -> Tensor:
        delta: Tensor | None = None
        for layer, rope in zip(self.layers, self._rope_of_layer, strict=True):
            delta = layer(stream, delta, rotations[rope], step)
        normed: Tensor = self.norm(stream, delta, step.backend)
        return normed


class DecoderForCausalLM(CausalLM):
    """A `Decoder` and its head; names of its parts are those of checkpoints.

    A family is a subclass that appends its layers to `model`.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel = SINGLE, model: Decoder | None = None
    ) -> None:
        super().__init__(config, tp)
        self.model = model or Decoder(config, tp)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Vocabulary(config.vocab_size, config.hidden_size, tp)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.logits(hidden)

    def reserve(self, max_len: int, device: torch.device) -> None:
        for rope in self.model.ropes:
            rope.reserve(max_len, device)

    def weights(self) -> Iterator[Weight]:
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.weights(path)
        if self.config.tie_word_embeddings:  # which some checkpoints store under either name
            for weight in self.lm_head.weights("lm_head"):
                yield replace(weight, same_as="model.embed_tokens.weight")
