"""How likely tokens are by the model's own distribution: the softmax of the untouched logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import QuireError
from quire.runner.transfer import BY_COPY_ENGINES, HostLink


@dataclass(frozen=True)
class Logprobs:
    """One token's log-probability and rank, and those of the likeliest tokens beside it."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest; equally likely tokens share the better rank
    top_ids: tuple[int, ...] = ()  # the k best, best first
    top_logprobs: tuple[float, ...] = ()

    def entries(self) -> Iterator[tuple[int, float, int]]:
        """(token id, logprob, rank) of the token itself, then of the k best that are others."""
        yield self.token_id, self.logprob, self.rank
        for i, (token_id, logprob) in enumerate(zip(self.top_ids, self.top_logprobs, strict=True)):
            if token_id != self.token_id:
                yield token_id, logprob, i + 1


def score(logits: Tensor, token_ids: Tensor, k: int, ranked: bool = True) -> Tensor:
    """float64 `[rows, 2 + 2k]`: logprob, rank (if `ranked`), ids of the k best, their logprobs.

    One type for all, so that everything a step brings back can travel in one piece; a double
    holds ids and float32 values exactly.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > own).sum(-1, keepdim=True) + 1 if ranked else torch.zeros_like(own)
    best = logprobs.topk(min(k, logits.shape[1]))
    return torch.cat([part.double() for part in (own, rank, best.indices, best.values)], dim=1)


class PromptScores:
    """How likely a prompt's rows found the token that really came next; on the way to the host."""

    def __init__(
        self, next_ids: Sequence[int], k: int, scores: Tensor, link: HostLink = BY_COPY_ENGINES
    ) -> None:
        self.next_ids = next_ids
        self.k = k
        self._fetch = link.fetch(scores)

    def to_host(self) -> list[Logprobs]:
        scores = self._fetch.wait()
        if np.isnan(scores[:, 0]).any():
            raise QuireError("the model gave no usable logits (NaN or infinite) for the prompt")
        return read_scores(scores, self.next_ids, [self.k] * len(scores))


def read_scores(
    scores: npt.NDArray[np.float64], token_ids: Sequence[int], ks: Sequence[int]
) -> list[Logprobs]:
    """The rows of `score`, each cut down to the `k` it asked for."""
    widest = (scores.shape[1] - 2) // 2
    read = []
    for row, token_id, k in zip(scores.tolist(), token_ids, ks, strict=True):
        count = min(k, widest)
        ids = tuple(int(best) for best in row[2 : 2 + count])
        values = tuple(row[2 + widest : 2 + widest + count])
        read.append(Logprobs(token_id, row[0], int(row[1]), ids, values))
    return read
