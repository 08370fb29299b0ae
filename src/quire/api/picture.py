"""The block pool drawn in text."""

from __future__ import annotations

from quire.kv.allocator import BlockAllocator

FREE, CACHED, USED, SHARED = "·", "░", "▓", "█"


def pool_picture(allocator: BlockAllocator, width: int = 64, height: int = 8) -> str:
    """One cell for each block, or for a run of them when there are too many.

    A cell of several blocks shows the busiest of them.
    """
    states = [_state(allocator, block) for block in range(allocator.num_blocks)]
    per_cell = max(1, -(-len(states) // (width * height)))
    cells = [max(states[i : i + per_cell]) for i in range(0, len(states), per_cell)]
    marks = [FREE, CACHED, USED, SHARED]
    lines = [
        "".join(marks[cell] for cell in cells[i : i + width]) for i in range(0, len(cells), width)
    ]
    counts = [states.count(state) for state in range(4)]
    names = ["free", "cached", "in use", "shared"]
    legend = "  ".join(f"{m} {n} {c}" for m, n, c in zip(marks, names, counts, strict=True))
    scale = "" if per_cell == 1 else f"  (a cell is {per_cell} blocks)"
    return "\n".join([*lines, legend + scale])


def _state(allocator: BlockAllocator, block: int) -> int:
    holders = allocator.ref_counts[block]
    if holders:
        return 3 if holders > 1 else 2
    return 1 if allocator.is_keyed(block) else 0
