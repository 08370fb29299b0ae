"""Decoders that pool, by their last token: the same layers as those of models that generate."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.hf_config import read_hf_config
from quire.models.pooling.facts import SCORE
from quire.models.pooling.model import HeadLayer, PoolingModel
from quire.models.pooling.recipe import Recipe
from quire.models.pooling.source import CLASSIFIER, PoolingFolder, PoolingSource
from quire.models.registry import family

CAUSAL = "ForCausalLM"
PREFIX = "model."  # of a decoder's tensors, but where the decoder alone was saved


def causal_architecture(architecture: str) -> str:
    """The generating model of the same family."""
    for ending in (CLASSIFIER, "Model"):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + CAUSAL
    return architecture


class DecoderSource(PoolingSource):
    config: ModelConfig

    def __init__(self, folder: PoolingFolder, task: str) -> None:
        super().__init__(folder, task, Recipe(("lasttoken",)))
        raw = folder.raw
        if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
            raise ModelError(
                f"{folder.path} is a decoder that looks both ways, which Quire does not compute: "
                f"choose another model."
            )
        is_asked = task == SCORE or self.recipe.yes_and_no is not None
        self.asks_yes_or_no = is_asked and not self.has_head
        config = read_hf_config(
            {**raw, "architectures": [causal_architecture(folder.architecture)]}
        )
        # Without logits there is no use for a matrix that makes them.
        is_tied = config.tie_word_embeddings or not self.asks_yes_or_no
        self.config = replace(config, tie_word_embeddings=is_tied)
        self.check(task)

    def shapes(self) -> PoolingModel:
        yes_and_no = self._yes_and_no() if self.asks_yes_or_no else None
        with torch.device("meta"):
            body = family(self.config.architecture)(self.config)
            head, modes = self.dense_layers(), self.recipe.modes
            if self.has_head:
                head = [HeadLayer("score", self.config.hidden_size, len(self.labels), bias=False)]
            if self.has_classes:
                modes = ("lasttoken",)
            return PoolingModel(self.config, body, modes, head, PREFIX, yes_and_no)

    def _yes_and_no(self) -> tuple[int, int]:
        told = self.recipe.yes_and_no
        if told is not None and max(told) < self.config.vocab_size:
            return told
        tokenizer = self.tokenizer()
        backend = None if tokenizer is None else tokenizer.backend
        ids = [] if backend is None else [backend.token_to_id(word) for word in ("yes", "no")]
        found = [each for each in ids if each is not None]
        if len(found) < 2:
            raise ModelError(
                f'task="score" compares the tokens "yes" and "no", and the tokenizer of '
                f"{self.folder.path} does not have them: choose another model."
            )
        return found[0], found[1]
