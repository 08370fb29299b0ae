"""Encoders that pool."""

from __future__ import annotations

import torch

from quire.models.encoders.config import EncoderConfig
from quire.models.encoders.encoder import Encoder
from quire.models.encoders.families import EncoderFamily
from quire.models.pooling.model import HeadLayer, PoolingModel
from quire.models.pooling.recipe import Recipe
from quire.models.pooling.source import PoolingFolder, PoolingSource


class EncoderSource(PoolingSource):
    config: EncoderConfig

    def __init__(self, folder: PoolingFolder, family: EncoderFamily, task: str) -> None:
        super().__init__(folder, task, Recipe(("mean",)))
        self.family = family
        self.config = family.config(folder.raw, folder.architecture)
        # RoBERTa's tokenizer gives all tokens the first type, whatever the model has.
        self.has_types = self.config.num_types > 1 and not family.counts_from_padding
        self.check(task)

    def shapes(self) -> PoolingModel:
        names, hidden = self.family.head, self.config.hidden_size
        with torch.device("meta"):
            body = Encoder(self.config, self.family.names)
            if not self.has_head:
                head, modes = self.dense_layers(), self.recipe.modes
            else:
                dense = HeadLayer(names.dense, hidden, hidden, activation=names.activation)
                head, modes = [dense, HeadLayer(names.out, hidden, len(self.labels))], ("cls",)
            return PoolingModel(self.config, body, modes, head, self.family.prefix)
