"""A language model as the engine sees it, whatever its family computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from quire.kv_groups import KVGroup, KVStream
from quire.layers.attention import Step
from quire.layers.embedding import Vocabulary
from quire.layers.kv_layer import KVLayer
from quire.layers.matrix import Matrix
from quire.layers.rope import RopeConfig
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Layer, Weight
from quire.models.blocks import Decoder
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.weights import assign, copy_weights
from quire.models.config import ModelConfig
from quire.models.rope import read_rope


class CausalLM(Block):
    """A language model over a paged KV cache; names of its parts are those of checkpoints.

    A family is a subclass that appends its layers to `model`. The class also says how its
    checkpoints are read: `defaults`, `rope`, `adapt` and `gguf`.
    """

    defaults: ClassVar[Raw] = {}  # of what its config.json may leave unsaid
    gguf: ClassVar[GGUFArchitecture | None] = None  # None: there are no GGUF files of it

    def __init__(
        self, config: ModelConfig, tp: TensorParallel = SINGLE, model: Decoder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.model = model or Decoder(config, tp)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Vocabulary(config.vocab_size, config.hidden_size, tp)
        )

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        """How this family's heads turn; a family that turns a part of each says so here."""
        return read_rope(raw, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        """Add what this family's config.json says beyond the common fields."""
        return config

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """`[tokens]` ids and positions to `[tokens, hidden]`, after the last norm."""
        hidden: Tensor = self.model(token_ids, positions, step)
        return hidden

    def reserve(self, max_len: int, device: torch.device) -> None:
        """Have tables for positions below `max_len`, so that no step has to make them longer."""
        for rope in self.model.ropes:
            rope.reserve(max_len, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, on rank 0."""
        return self.lm_head.logits(hidden)

    def kv_groups(self, tp: TensorParallel) -> tuple[KVGroup, ...]:
        """What one of these ranks caches: layers of the same shape and reach are a group."""
        groups: dict[tuple[tuple[KVStream, ...], int | None], list[int]] = {}
        for module in self.modules():
            if isinstance(module, KVLayer):
                groups.setdefault((module.streams(tp), module.window), []).append(module.layer)
        return tuple(
            KVGroup(tuple(layers), streams, window) for (streams, window), layers in groups.items()
        )

    def weights(self) -> Iterator[Weight]:
        """Every tensor that a checkpoint of this model has."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.weights(path)
        if self.config.tie_word_embeddings:  # which some checkpoints store under either name
            for weight in self.lm_head.weights("lm_head"):
                yield replace(weight, same_as="model.embed_tokens.weight")

    def check_weights(self, tensors: Iterable[tuple[str, LazyTensor]]) -> None:
        """Raise `ModelError` unless these are the tensors of this model; none is read."""
        assign(self, tensors)

    def load_weights(
        self, tensors: Iterable[tuple[str, LazyTensor]], progress: bool = False
    ) -> None:
        """Fill the model from tensors of these names; what does not fit is a `ModelError`."""
        copy_weights(self, tensors, progress)

    def pack(self) -> None:
        """Keep a second copy of the matrices, in the order a CPU's kernels read them."""
        for module in self.modules():
            if isinstance(module, Matrix):
                module.pack()
