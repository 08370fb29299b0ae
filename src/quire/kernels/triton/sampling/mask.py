"""Rules tokens out of rows of logits, by packed bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv

STRETCH = 4096  # tokens


def rule_out_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set logits to -inf, in place, where the bit is 0 that stands for them.

    `rows` (int32) names the rows that have a mask, `words` (int32) has one row of bits for each.
    """
    vocab_size = logits.shape[1]
    grid = (len(rows), cdiv(vocab_size, STRETCH))
    _rule_out[grid](
        logits, rows, words, logits.stride(0), words.stride(0), VOCAB=vocab_size, STRETCH=STRETCH
    )


@triton.jit
def _rule_out(
    logits, rows, words, row_stride, word_stride, VOCAB: tl.constexpr, STRETCH: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    there = token < VOCAB
    word = tl.load(words + place * word_stride + token // 32, mask=there, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    minus = tl.full((STRETCH,), float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * row_stride + token, minus, mask=there & banned)
