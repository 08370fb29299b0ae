"""The rule of hits, slow and obvious: position by position, every length from the longest on."""


def visible(length, window):
    """Positions that the token behind the first `length` sees, but for its own."""
    return range(0 if window is None else max(0, length - window + 1), length)


def needed(length, window):
    """The visible positions, or the last one: its block says that the prefix was computed."""
    return visible(length, window) or range(max(0, length - 1), length)


def plain_hit(num_blocks, windows, block_size, has):
    for count in range(num_blocks, -1, -1):
        if all(
            has(at, position // block_size)
            for at, window in enumerate(windows)
            for position in needed(count * block_size, window)
        ):
            return count
    raise AssertionError("a prefix of nothing is always there")
