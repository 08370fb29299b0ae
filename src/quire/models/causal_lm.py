"""What the runner and the loaders ask of every model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kv_groups import KVGroup, KVStream
from quire.layers.attention import Step
from quire.layers.kv_layer import KVLayer
from quire.layers.linear import MatrixLayer
from quire.layers.rope import RopeConfig
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Weight
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.json_fields import Raw
from quire.models.config import CheckpointConfig, ModelConfig
from quire.models.rope import read_rope


class CheckpointModel(Block, ABC):
    """What loaders ask of a model: the tensors that a checkpoint has for it."""

    # Whether checkpoints have `experts.down_proj` and the like as [experts, inputs, outputs].
    transposed_experts: bool = False

    def __init__(self, config: CheckpointConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.tp = tp

    def text_tensor(self, name: str) -> str | None:
        """What `weights` calls a checkpoint's tensor; None: it is not of this model."""
        return name

    def unexpected(self, left_out: Collection[str]) -> list[str]:
        """The tensors that `text_tensor` leaves out, and that no checkpoint of this model has."""
        return []

    def left_out(self, count: int) -> str | None:
        """What to say of `count` tensors of a checkpoint that are not of this model."""
        return f"{count:,} tensors are not of the language model, and are not loaded."

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Every tensor that a checkpoint of this model has."""

    def pack(self) -> None:
        """Keep a second copy of the matrices, in the order a CPU's kernels read them."""
        for module in self.modules():
            if isinstance(module, MatrixLayer):
                module.pack()


class CausalLM(CheckpointModel):
    """A language model over a paged KV cache.

    The class of a family also says how its checkpoints are read: `defaults`, `rope`, `adapt` and
    `gguf`; where they hold more than a language model, `text_config` and `text_tensor` as well.
    """

    config: ModelConfig
    defaults: ClassVar[Raw] = {}  # of what its config.json may leave unsaid
    gguf: ClassVar[GGUFArchitecture | None] = None  # None: there are no GGUF files of it
    activation: ClassVar[Activation] = Activation.SILU  # the one that its MLPs compute
    activation_field: ClassVar[str] = "hidden_act"  # where its config.json names one
    head_dim_field: ClassVar[str] = "head_dim"  # where it says how wide the heads are that turn

    @classmethod
    def text_config(cls, raw: Raw) -> Raw:
        """What config.json says of the language model."""
        return raw

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        """How this family's heads turn; a family that turns a part of each says so here."""
        return read_rope(raw, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        """Add what this family's config.json says beyond the common fields."""
        return config

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """`[tokens]` ids and positions to `[tokens, hidden]`, after the last norm."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, on rank 0."""

    @abstractmethod
    def reserve(self, max_len: int, device: torch.device) -> None:
        """Have tables for positions below `max_len`, so that no step has to make them longer."""

    def kv_groups(self, tp: TensorParallel) -> tuple[KVGroup, ...]:
        """What one of these ranks caches: layers of the same shape and reach are a group."""
        groups: dict[tuple[tuple[KVStream, ...], int | None], list[int]] = {}
        for module in self.modules():
            if isinstance(module, KVLayer):
                groups.setdefault((module.streams(tp), module.window), []).append(module.layer)
        return tuple(
            KVGroup(tuple(layers), streams, window) for (streams, window), layers in groups.items()
        )
