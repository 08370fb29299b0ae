"""Which blocks that a window has left behind are likely to be wanted again.

A prefix is a hit only where the window in front of its end is whole. Requests come back to where a
prompt ended, or an answer; in between one window every `STRIDE` tokens is kept, so that a prompt
that leaves a long one halfway does not begin from nothing. All others are evicted first.
"""

from __future__ import annotations

STRIDE = 4096  # tokens


def is_kept(block: int, window: int, block_size: int, prompt_len: int) -> bool:
    """Whether a block is part of a window that ends the prompt, or a stride.

    The last token of a prompt is always computed, so the same prompt again needs a block less.
    """
    start, end = block * block_size, (block + 1) * block_size
    last_hit = (prompt_len - 1) // block_size * block_size
    if start < prompt_len and end > last_hit - window + 1:
        return True
    next_stride = (start // STRIDE + 1) * STRIDE
    return end > next_stride - window + 1
