"""The longest prefix that all groups can serve, against a plain search, for all there can be."""

from itertools import combinations, product

import numpy as np
import pytest
from plain_hits import needed, plain_hit, visible

from quire.kv.hit_rule import first_needed, longest_hit
from quire.kv.index import GONE
from quire.kv.prefix import PrefixCache
from quire.kv.room import longest_sequence, most_held

NOT_ONE = -9


def all_gaps(num_blocks, most):
    """Every set of blocks that may be missing, of `most` at most."""
    counts = range(min(most, num_blocks) + 1)
    return [frozenset(gap) for count in counts for gap in combinations(range(num_blocks), count)]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_first_block_needed_is_that_of_the_first_position_seen(window, block_size):
    for length in range(30):
        positions = needed(length, window)
        assert first_needed(length, window, block_size) == (positions or [0])[0] // block_size


def test_a_window_that_reaches_no_earlier_token_needs_the_last_block():
    """Otherwise a prefix that was never computed would be a hit."""
    assert longest_hit(5, (1,), 4, lambda at, block: False) == 0
    assert longest_hit(5, (1,), 4, lambda at, block: block == 2) == 3


@pytest.mark.parametrize(
    ("windows", "block_size", "most"),
    [
        ((None,), 2, 6),
        ((4,), 2, 6),
        ((5,), 2, 7),
        ((1,), 4, 3),
        ((None, 4), 2, 6),
        ((3, 6), 2, 6),
        ((6, 3), 3, 6),
        ((None, 5, 6), 2, 2),
    ],
)
def test_the_hit_is_the_longest_that_all_groups_can_serve(windows, block_size, most):
    """Every length up to three windows, every combination of blocks that groups lack."""
    widest = max(window or 4 for window in windows)
    for num_blocks in range(-(-3 * widest // block_size) + 1):
        gaps = all_gaps(num_blocks, most if num_blocks < 7 else 1)
        for missing in product(gaps, repeat=len(windows)):

            def has(at, block, missing=missing):
                return block not in missing[at]

            found = longest_hit(num_blocks, windows, block_size, has)
            assert found == plain_hit(num_blocks, windows, block_size, has), (num_blocks, missing)


@pytest.mark.parametrize("windows", [(None, 4), (4,), (4, 6), (None, 6, 4), (None, 4, 4)])
def test_a_match_in_the_cache_follows_the_rule(windows):
    """Every combination of up to two blocks that each window lacks, over three windows."""
    block_size, num_blocks = 2, 9
    distinct = [window for window in dict.fromkeys(windows) if window is not None]
    tokens = np.arange(block_size * num_blocks, dtype=np.int32)
    for missing in product(all_gaps(num_blocks, 2), repeat=len(distinct)):
        cache, chain = published(windows, tokens, num_blocks)
        for window, gap in zip(distinct, missing, strict=True):
            for place in gap:
                lack(cache, chain[place], windows.index(window))

        def has(at, block, missing=missing):
            window = windows[at]
            return window is None or block not in missing[distinct.index(window)]

        expected = plain_hit(num_blocks, windows, block_size, has)
        found = cache.match("", tokens, [], len(tokens))
        assert len(found) == expected and [n.tokens for n in found] == [
            n.tokens for n in chain[:expected]
        ]
        table = cache.table_behind(found)
        assert table.length == expected * block_size
        for group, of_group in enumerate(table.groups):
            blocks = of_group.ids.tolist()
            assert GONE not in blocks
            assert blocks == [node.blocks[group] for node in found[of_group.first :]]
            seen = visible(table.length, windows[group])
            assert of_group.first * block_size <= (seen[0] if seen else table.length)
        table.truncate(0)
        assert cache.allocator.num_in_use == 0


def published(windows, tokens, num_blocks):
    """A cache that holds `tokens`, which no sequence holds; and their chain."""
    cache = PrefixCache(num_blocks * len(windows), len(tokens) // num_blocks, windows=windows)
    table, chain = cache.new_table(), []
    table.append(len(tokens))
    cache.publish("", chain, tokens, *[each.ids.tolist() for each in table.groups])
    table.truncate(0)
    return cache, chain


def lack(cache, node, group):
    """Make the cache forget what one group has at a node."""
    cache.withdraw(node, *[b if g == group else NOT_ONE for g, b in enumerate(node.blocks)])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_no_more_blocks_are_held_than_foreseen(window, block_size, chunk):
    """Steps of `chunk` tokens, of which the last but one is committed when one is planned."""
    length = 40
    cache = PrefixCache(2 * length, block_size, windows=(window,))
    table = cache.new_table()
    most = 0
    for end in range(chunk, length + 1, chunk):
        table.append(end - table.length)
        most = max(most, len(table))
        if end > chunk:
            table.give_back(end - chunk)
    assert most <= most_held(length, window, block_size, 2 * chunk)
    if window is not None and chunk > 1:
        assert most_held(10_000, window, block_size, 2 * chunk) <= most + 2


def test_the_longest_sequence_of_a_pool_fits_and_one_longer_does_not():
    for windows, num_blocks in product([(None,), (None, 8), (8, 20)], range(1, 40)):
        most = longest_sequence(num_blocks, windows, 4, 6, 200)
        held = [sum(most_held(n, w, 4, 6) for w in windows) for n in (most, most + 1)]
        assert held[0] <= num_blocks and (held[1] > num_blocks or most == 200)
    assert longest_sequence(100, (8, 20), 4, 6, 5000) == 5000
