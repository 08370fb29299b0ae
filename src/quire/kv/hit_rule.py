"""Which blocks a prefix needs to be cached, and the longest prefix that has them: the one rule.

    window of 6, blocks of 4     0 1 2 3 │ 4 5 6 7 │ 8 9 . .      n = 10
    the next token sees                      └───────────┘        it is at 10 and sees 5 to 10
    needed                                 block 1   block 2      of this group; of a full one all

A prefix of n tokens is cached if the full groups have all its blocks, and each window group has
those that the next token looks into, and the last in any case. A hit is the longest such prefix,
not the shortest of what each group has for itself: where a window is missing, a shorter prefix may
have its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Window = int | None  # positions that a token sees, its own included; None: all


def first_needed(length: int, window: Window, block_size: int) -> int:
    """The first block that the token behind the first `length` looks into, or the last of all."""
    if window is None or length < kept_reach(window):
        return 0
    return (length - kept_reach(window) + 1) // block_size


def kept_reach(window: int) -> int:
    """How far back blocks are kept, and needed for a hit.

    Even where a token sees itself alone, the last whole block is. Without it any prefix would be a
    hit, also one that was never computed and that no index has a node for. The block may also have
    been published by the step behind the one that was committed, and that step may yet be taken
    back.
    """
    return max(window, 2)


def longest_hit(
    num_blocks: int,
    windows: Sequence[Window],
    block_size: int,
    has: Callable[[int, int], bool],
) -> int:
    """How many whole blocks, of the first `num_blocks` at most, the longest cached prefix has.

    `has(at, block)`: whether the group of `windows[at]` has the block at this place of the chain.
    A shorter prefix needs no block behind those that a longer one needs, but perhaps others in
    front: so the lowest that is missing bounds what can be a hit, and the look goes on from there.
    """
    length, confirmed = num_blocks, 0
    at = 0
    while length and confirmed < len(windows):
        first = first_needed(length * block_size, windows[at], block_size)
        missing = next((block for block in range(first, length) if not has(at, block)), None)
        if missing is None:
            confirmed += 1
        else:
            length, confirmed = missing, 0
        at = (at + 1) % len(windows)
    return length
