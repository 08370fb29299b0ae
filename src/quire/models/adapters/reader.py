"""Reads adapters for one rank of a model: all is checked first, and then read, cut and scaled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.tp import TensorParallel
from quire.layers.weights import ranges
from quire.models.adapters.adapter import EMBEDDING, Adapter
from quire.models.adapters.changes import find_changes, find_replacements
from quire.models.adapters.config import read_adapter_config
from quire.models.adapters.fingerprint import ContentDigest
from quire.models.adapters.pieces import Pieces, finite
from quire.models.adapters.targets import Targets
from quire.models.adapters.tensors import Named, open_tensors
from quire.models.config import ModelConfig


class AdapterReader:
    """Made once for a model; several threads may use it."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, max_rank: int
    ) -> None:
        self._targets = Targets(config, tp)
        self._dtype, self._max_rank = dtype, max_rank

    def read(self, folder: Path) -> Adapter:
        """ModelError, in a sentence that names a field or tensor, if it is not for this model."""
        config, tensors = read_adapter_config(folder), open_tensors(folder)
        changes = find_changes(config, tensors, self._targets)
        replaced = find_replacements(config, tensors, self._targets)
        rank = max((change.rank for change in changes), default=0)
        if rank > self._max_rank:
            raise ModelError(
                f"{folder} has rank {rank}, more than max_lora_rank={self._max_rank}: set "
                f"max_lora_rank={rank}, or choose an adapter of a lower rank."
            )
        digest = ContentDigest()
        pieces = Pieces(self._targets, self._dtype)
        for change in changes:
            pieces.add(change, digest)
        layers = pieces.by_layer()
        embedding = layers.pop(EMBEDDING, (None,))[0]
        whole = {name: self._rows(name, replaced[name], digest) for name in sorted(replaced)}
        return Adapter(digest.result(), rank, layers, embedding, whole)

    def _rows(self, name: str, named: Named, digest: ContentDigest) -> Tensor:
        """This rank's part of the embedding or the head."""
        whole = digest.read(name, 1.0, named)
        rows = ranges(whole.shape, self._targets.vocabulary[name].part)[0]
        return finite(named, whole[rows.start : rows.stop].to(self._dtype, copy=True))
