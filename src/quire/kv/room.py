"""How many blocks a sequence takes: of full groups for all its tokens, of windows for a few.

window group   ├─ given back ─┤── window ──┤── computed, not committed ──┤
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv.hit_rule import Window, kept_reach

STEPS_AHEAD = 2  # that are planned and not committed: the one under way, and the next


def most_held(length: int, window: Window, block_size: int, most_ahead: int) -> int:
    """Blocks of one group that a sequence holds at once until `length` tokens are computed.

    `most_ahead`: tokens that are planned and not committed, at most.
    """
    total = -(-length // block_size)
    if window is None:
        return total
    # Given back is up to the window of the last whole block, which may be almost a block behind.
    behind = -(-(kept_reach(window) - 1) // block_size)
    ahead = -(-(most_ahead + block_size - 1) // block_size)
    return min(total, behind + ahead)


def longest_sequence(
    num_blocks: int, windows: Sequence[Window], block_size: int, most_ahead: int, most: int
) -> int:
    """How many tokens a sequence may have that is alone in the pool; `most` at most."""

    def fits(length: int) -> bool:
        held = sum(most_held(length, window, block_size, most_ahead) for window in windows)
        return held <= num_blocks

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
