"""What a model that pools is read from: a folder's own files, and what lies beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.errors import ModelError
from quire.layers.formats import AllDense
from quire.models.checkpoints.folder import read_tokenizer
from quire.models.checkpoints.json_fields import Raw
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.safetensors import folder_tensors
from quire.models.config import CheckpointConfig
from quire.models.pooling.classes import class_names, score_activation
from quire.models.pooling.facts import CLASSIFY, EMBED, IDENTITY, NORMALIZE, SCORE, PoolingFacts
from quire.models.pooling.model import HeadLayer, PoolingModel
from quire.models.pooling.recipe import Recipe
from quire.models.source import fill_model

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class PoolingFolder:
    """A model's files, as far as they are read before anything is built."""

    path: Path
    raw: Raw  # config.json
    architecture: str
    recipe: Recipe | None  # of a sentence-transformers folder

    @property
    def body(self) -> Path:
        """Where the model itself is."""
        return self.path / self.recipe.transformer if self.recipe is not None else self.path


class PoolingSource(ABC):
    """A model that pools, before it is built; a subclass for encoders, one for decoders."""

    config: CheckpointConfig
    has_types = False
    asks_yes_or_no = False

    def __init__(self, folder: PoolingFolder, task: str, default: Recipe) -> None:
        """`default` is for a folder that does not say how its model pools."""
        self.folder = folder
        self.recipe = folder.recipe or default
        self.has_head = folder.architecture.endswith(CLASSIFIER)
        self.labels = class_names(folder.raw) if self.has_head else ("score",)

    @abstractmethod
    def shapes(self) -> PoolingModel:
        """The model without memory."""

    def check(self, task: str) -> None:
        if task in (CLASSIFY, SCORE) and not self.has_classes:
            raise ModelError(
                f"{self.folder.path} has no head for task={task!r}: choose a model for sequence "
                f"classification, or task='embed'."
            )
        if self.config.formats != AllDense():
            raise ModelError(
                f"{self.folder.path} is quantised, and Quire pools with plain weights alone: "
                f"choose the model it was made from."
            )

    @property
    def has_classes(self) -> bool:
        return self.has_head or self.asks_yes_or_no

    @property
    def max_len(self) -> int:
        """Of a text, where no other length is asked for."""
        positions = self.config.max_position_embeddings
        return min(self.recipe.max_seq_length or positions, positions)

    def facts(self) -> PoolingFacts:
        recipe = self.recipe
        if self.has_classes:
            task, size = CLASSIFY, len(self.labels)
            activation = score_activation(self.folder.raw, size)
        else:
            pooled = self.config.hidden_size * len(recipe.modes)
            task, size = EMBED, recipe.dense[-1].outputs if recipe.dense else pooled
            activation = NORMALIZE if recipe.normalize else IDENTITY
        return PoolingFacts(
            task=task,
            size=size,
            activation=activation,
            labels=self.labels if self.has_classes else (),
            prompts=recipe.prompts,
            default_prompt=recipe.default_prompt,
            lower_case=recipe.lower_case,
            has_types=self.has_types,
            asks_yes_or_no=self.asks_yes_or_no or self._is_converted_reranker,
        )

    @property
    def _is_converted_reranker(self) -> bool:
        """Qwen3-Reranker, whose rows for "yes" and "no" were made a head with one class."""
        return self.folder.architecture == f"Qwen3{CLASSIFIER}" and len(self.labels) == 1

    def dense_layers(self) -> list[HeadLayer]:
        """What sentence-transformers puts behind pooling."""
        return [
            HeadLayer(f"{dense.folder}.linear", dense.inputs, dense.outputs, dense.bias, dense.act)
            for dense in self.recipe.dense
        ]

    def tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self.folder.body)

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        yield from folder_tensors(self.folder.body)
        for dense in self.recipe.dense:
            for name, tensor in folder_tensors(self.folder.path / dense.folder):
                yield f"{dense.folder}.{name}", tensor

    def build(
        self, dtype: torch.dtype, device: torch.device, progress: bool, dummy: bool
    ) -> PoolingModel:
        """The model with its weights in place, ready to run; `dummy`: with random ones."""
        model = self.shapes()
        fill_model(model, None if dummy else self, dtype, device, progress)
        return model
