"""From the hidden states of whole texts, laid end to end, to one vector each; in float32.

The names of the modes are those of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.packed import PackedTexts


def _first(hidden: Tensor, texts: PackedTexts) -> Tensor:
    return hidden[texts.starts[:-1]].float()


def _last(hidden: Tensor, texts: PackedTexts) -> Tensor:
    return hidden[texts.starts[1:] - 1].float()


def _mean(hidden: Tensor, texts: PackedTexts) -> Tensor:
    return _reduced(hidden, texts, "mean")


def _max(hidden: Tensor, texts: PackedTexts) -> Tensor:
    return _reduced(hidden, texts, "max")


def _mean_sqrt_len(hidden: Tensor, texts: PackedTexts) -> Tensor:
    return _mean(hidden, texts) * _lengths(texts).sqrt()


def _weighted_mean(hidden: Tensor, texts: PackedTexts) -> Tensor:
    """The second token counts twice, the third three times, …"""
    weights = torch.cat([torch.arange(1, n + 1) for n in texts.lengths]).to(hidden.device)
    total = _lengths(texts) * (_lengths(texts) + 1) / 2
    return _reduced(hidden.float() * weights[:, None], texts, "sum") / total


def _reduced(hidden: Tensor, texts: PackedTexts, how: str) -> Tensor:
    lengths = texts.starts.diff().long()
    return torch.segment_reduce(hidden.float(), how, lengths=lengths, axis=0, unsafe=True)


def _lengths(texts: PackedTexts) -> Tensor:
    return texts.starts.diff()[:, None].float()


MODES: dict[str, Callable[[Tensor, PackedTexts], Tensor]] = {
    "cls": _first,
    "mean": _mean,
    "max": _max,
    "lasttoken": _last,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}


def pool(hidden: Tensor, texts: PackedTexts, modes: Sequence[str]) -> Tensor:
    """`[tokens, hidden]` to `[texts, hidden]`; of several modes, their vectors side by side."""
    return torch.cat([MODES[mode](hidden, texts) for mode in modes], dim=1)
