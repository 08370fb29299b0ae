"""The texts of one step, from the host to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.packed import PackedTexts
from quire.runner.text_batch import TextBatch
from quire.runner.transfer import BY_COPY_ENGINES, Array


@dataclass(frozen=True)
class TextTensors:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], of each in its text
    types: Tensor | None  # int64 [tokens]: 1 in the second text of a pair; None: all are 0
    texts: PackedTexts


def text_tensors(batch: TextBatch, device: torch.device) -> TextTensors:
    lengths = batch.lengths
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lengths)
    arrays: list[Array] = [np.stack([batch.token_ids, positions]), starts]
    if (batch.seconds < lengths).any():
        arrays.append((positions >= np.repeat(batch.seconds, lengths)).astype(np.int64))
    tensors = BY_COPY_ENGINES.all_to_device(arrays, device)
    types = tensors[2] if len(tensors) > 2 else None
    texts = PackedTexts(lengths.tolist(), tensors[1])
    return TextTensors(tensors[0][0], tensors[0][1], types, texts)
