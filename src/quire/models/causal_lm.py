"""What the runner and the loaders ask of every model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.layers.attention import Step
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Weight
from quire.models.checkpoints.json_fields import Raw
from quire.models.config import ModelConfig


class CausalLM(Block, ABC):
    """A language model over a paged KV cache."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.tp = tp

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        """Add what this family's config.json says, or leaves unsaid, beyond the common fields."""
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

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Every tensor that a checkpoint of this model has."""

    @abstractmethod
    def pack(self) -> None:
        """Keep a second copy of the matrices, in the order a CPU's kernels read them."""
