"""Which blocks that a window has left behind are likely to be wanted again.

A prefix is a hit only where the window in front of its end is whole. Requests come back to where a
prompt ended, or an answer; in between one window every `STRIDE` tokens is kept, so that a prompt
that leaves a long one halfway does not begin from nothing. All others are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv.hit_rule import Window, first_needed, kept_reach
from quire.kv.keys import group_keys

STRIDE = 4096  # tokens


def is_kept(block: int, window: int, block_size: int, prompt_len: int) -> bool:
    """Whether a block is part of a window that ends the prompt, or a stride.

    The last token of a prompt is always computed, so the same prompt again needs a block less.
    """
    start, end = block * block_size, (block + 1) * block_size
    reach = kept_reach(window)
    last_hit = (prompt_len - 1) // block_size * block_size
    if start < prompt_len and end > last_hit - reach + 1:
        return True
    next_stride = (start // STRIDE + 1) * STRIDE
    return end > next_stride - reach + 1


def asked_keys(
    keys: Sequence[bytes], windows: Sequence[Window], block_size: int, prompt_len: int, hit: int
) -> list[bytes]:
    """What a prompt asks for, of all KV groups, from its first block on.

    `keys` are those of its chain, of which `hit` blocks are cached. Of a window it asks for what
    the hit needs, and for what is kept.
    """
    asked: list[list[bytes]] = [[] for _ in keys]
    for group, window in enumerate(windows):
        places = list(range(len(keys)))
        if window is not None:
            needed = range(first_needed(hit * block_size, window, block_size), hit)
            places = [
                p for p in places if p in needed or is_kept(p, window, block_size, prompt_len)
            ]
        wanted = group_keys([keys[place] for place in places], group)
        for place, key in zip(places, wanted, strict=True):
            asked[place].append(key)
    return [key for of_place in asked for key in of_place]
