"""The texts of one step, from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.packed import PackedTexts
from quire.runner.transfer import BY_COPY_ENGINES, Array


@dataclass(frozen=True)
class TextBatch:
    """Whole texts, laid end to end."""

    token_ids: Sequence[Array]  # of each text
    seconds: Sequence[int | None]  # where the second text of each begins, if it is a pair

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]


@dataclass(frozen=True)
class TextTensors:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], of each in its text
    types: Tensor | None  # int64 [tokens]: 1 in the second text of a pair; None: all are 0
    texts: PackedTexts


def text_tensors(batch: TextBatch, device: torch.device) -> TextTensors:
    lengths = np.array(batch.lengths, dtype=np.int64)
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lengths)
    ids = np.concatenate(batch.token_ids).astype(np.int64)
    arrays: list[Array] = [np.stack([ids, positions]), starts]
    if any(second is not None for second in batch.seconds):
        pairs = zip(batch.seconds, lengths, strict=True)
        seconds = np.array([length if second is None else second for second, length in pairs])
        arrays.append((positions >= np.repeat(seconds, lengths)).astype(np.int64))
    tensors = BY_COPY_ENGINES.all_to_device(arrays, device)
    types = tensors[2] if len(tensors) > 2 else None
    texts = PackedTexts(batch.lengths, tensors[1])
    return TextTensors(tensors[0][0], tensors[0][1], types, texts)
