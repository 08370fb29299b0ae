"""Which tokens each row of a step may draw, as bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.transfer import BY_COPY_ENGINES, HostLink

Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenMasks:
    """Plain data, like a plan. Bit `t % 32` of word `t // 32` says whether token `t` may be drawn.

    Rows that are not named may draw any token.
    """

    rows: Words  # [masked rows]: their places among the step's draws
    words: Words  # [masked rows, vocabulary / 32]

    def among(self, draws: Sequence[int]) -> TokenMasks:
        """The same masks where only these draws are made, which have all of its rows."""
        return TokenMasks(np.searchsorted(draws, self.rows).astype(np.int32), self.words)


def mask_(logits: Tensor, masks: TokenMasks, link: HostLink = BY_COPY_ENGINES) -> None:
    """Rule out, in place, what the masks do not allow, in rows of float32 `logits`."""
    if logits.is_cuda:
        from quire.kernels.triton.sampling.mask import rule_out_

        rows, words = link.all_to_device([masks.rows, masks.words], logits.device)
        rule_out_(logits, rows, words)
        return
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
    banned = torch.from_numpy(bits[:, : logits.shape[1]] == 0)
    if len(masks.rows) == len(logits):
        logits.masked_fill_(banned, -torch.inf)
        return
    for row, out in zip(masks.rows.tolist(), banned, strict=True):
        logits[row].masked_fill_(out, -torch.inf)
