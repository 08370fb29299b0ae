"""Tables that give blocks back, tables of several groups, and nodes with a block a group."""

import numpy as np
import pytest

from quire.kv.allocator import BlockAllocator, OutOfBlocks
from quire.kv.block_log import BlockLog
from quire.kv.index import GONE
from quire.kv.kept_windows import STRIDE, is_kept
from quire.kv.keys import Namespace
from quire.kv.prefix import PrefixCache
from quire.kv.table import BlockTable

TOKENS = np.arange(64, dtype=np.int32)
NAMESPACE = Namespace("m", "float32", "float32", 4, "1", "none")


def compute(cache, length, tokens=TOKENS):
    """A sequence with so many tokens, all published and committed."""
    table, nodes = cache.new_table(), []
    table.append(length)
    blocks = [each.ids[: length // 4].tolist() for each in table.groups]
    cache.publish("", nodes, tokens[: length // 4 * 4], *blocks)
    table.give_back(length)
    return table, nodes


def hit(cache, tokens=TOKENS):
    return len(cache.match("", tokens, [], len(tokens)))


def test_a_window_gives_back_what_no_later_token_sees():
    table = BlockTable(BlockAllocator(8), 4, window=6)
    table.append(21)
    before = table.ids.tolist()
    table.give_back(9)  # the next sees 4 and up; a hit at 8 needs 3 and up
    assert table.first == 0
    table.give_back(13)  # a hit at 12 needs 7 and up
    assert (table.first, table.ids.tolist(), table.length) == (1, before[1:], 21)
    table.give_back(12)  # nothing comes back
    assert table.first == 1
    slots = table.slots(5, 21)
    assert slots.tolist() == [before[p // 4] * 4 + p % 4 for p in range(5, 21)]
    assert table.room == 3 and table.append(3) == [] and table.blocks_needed(1) == 1
    table.truncate(14)
    assert table.ids.tolist() == before[1:4] and table.blocks_needed(3) == 1
    table.truncate(0)
    assert (table.first, len(table), table.allocator.num_free) == (0, 0, 8)


def test_a_fork_of_a_window_has_its_first_too():
    table = BlockTable(BlockAllocator(8), 4, window=6)
    table.append(18)
    table.give_back(18)
    twin = table.fork()
    assert (twin.first, twin.window, twin.length) == (table.first, 6, 18)
    ((source, target),) = twin.append(1)
    assert source == table.ids[-1] and target == twin.ids[-1]


def test_several_groups_grow_in_all_or_in_none():
    cache = PrefixCache(7, 4, windows=(None, 6, 6))
    table = cache.new_table()
    assert table.blocks_needed(5) == 6
    table.append(5)
    assert (table.length, table.room, len(table)) == (5, 3, 6)
    assert sorted(table.ids.tolist()) == list(range(6))
    with pytest.raises(OutOfBlocks):
        table.append(4)
    assert [len(each) for each in table.groups] == [2, 2, 2]
    assert [each.length for each in table.groups] == [5, 5, 5]


def test_several_groups_copy_what_they_share():
    cache = PrefixCache(12, 4, windows=(None, 6))
    table = cache.new_table()
    table.append(6)
    twin = table.fork()
    copies = twin.append(1)
    assert copies == [(t.ids[1], w.ids[1]) for t, w in zip(table.groups, twin.groups, strict=True)]
    assert table.append(1) == []
    twin.truncate(0)
    table.truncate(0)
    assert cache.allocator.num_free == 12


def test_what_is_given_back_is_evicted_before_blocks_of_full_groups():
    cache = PrefixCache(10, 4, windows=(None, 4))
    old, _ = compute(cache, 4)
    old.truncate(0)
    table, nodes = compute(cache, 16, TOKENS[20:])
    assert cache.allocator.num_free == 0 and table.groups[1].first == 3
    cache.allocator.allocate(3)
    assert [node.blocks[1] == GONE for node in nodes] == [True, True, True, False]
    assert hit(cache) == 1, "the prefix that was used least recently is still there"


def test_windows_that_end_a_prompt_or_a_stride_are_kept_as_long_as_others():
    kept = [place for place in range(1024) if is_kept(place, 128, 16, 1000)]
    prompt = range((992 - 127) // 16, -(-1000 // 16))
    strides = [range((end - 127) // 16, end // 16) for end in range(STRIDE, 1024 * 16 + 1, STRIDE)]
    assert kept == [*prompt, *(place for stride in strides for place in stride)]


def test_a_prompt_is_found_again_though_its_sequence_has_gone_on():
    cache = PrefixCache(20, 4, windows=(None, 8))
    table, nodes = cache.new_table(), []
    table.append(40)
    cache.publish("", nodes, TOKENS[:40], *[each.ids.tolist() for each in table.groups])
    table.give_back(40, prompt_len=17)
    spent = sum(cache.allocator.ref_counts[node.blocks[1]] == 0 for node in nodes)
    assert spent == 8
    cache.allocator.allocate(spent - 3)
    assert hit(cache, TOKENS[:17]) == 4
    assert hit(cache, TOKENS[:36]) == 5, "what lies behind the prompt's window was evicted"


def test_a_shorter_hit_where_the_longest_lacks_its_window():
    cache = PrefixCache(30, 4, windows=(None, 8))
    _, nodes = compute(cache, 40)
    for place in (7, 4):
        cache.withdraw(nodes[place], GONE - 1, nodes[place].blocks[1])
    assert hit(cache) == 10, "its window is there"
    cache.withdraw(nodes[9], GONE - 1, nodes[9].blocks[1])
    assert hit(cache) == 7
    cache.withdraw(nodes[6], GONE - 1, nodes[6].blocks[1])
    assert hit(cache) == 4


def test_blocks_of_one_window_go_together():
    cache = PrefixCache(40, 4, windows=(None, 8, 8, 4))
    table, nodes = compute(cache, 16)
    table.truncate(0)
    node = nodes[2]
    before = cache.allocator.num_cached
    cache.withdraw(node, GONE - 1, node.blocks[1])
    assert node.blocks[1] == node.blocks[2] == GONE and GONE not in (node.blocks[0], node.blocks[3])
    assert cache.allocator.num_cached == before - 2
    cache.withdraw(node, node.blocks[0])
    assert node.blocks == [GONE] * 4 and not node.is_found
    assert cache.allocator.num_cached == before - 4
    assert hit(cache) == 2


def test_a_window_that_has_left_is_filled_again():
    cache = PrefixCache(30, 4, windows=(None, 8))
    table, nodes = compute(cache, 16)
    cache.withdraw(nodes[3], GONE - 1, nodes[3].blocks[1])
    assert hit(cache) == 3
    again, same = compute(cache, 16)
    assert same == nodes and hit(cache) == 4
    assert nodes[3].blocks == [table.groups[0].ids[3], again.groups[1].ids[-1]]
    again.truncate(0)
    table.truncate(0)
    assert cache.allocator.num_in_use == 0 and hit(cache) == 4


def test_without_full_groups_a_prefix_is_found_by_its_last_window():
    cache = PrefixCache(40, 4, windows=(8, 4))
    _, nodes = compute(cache, 40)
    for node in nodes[:7]:
        cache.withdraw(node, *node.blocks)
    assert hit(cache) == 10 and all(node.is_found for node in nodes)
    assert [each.first for each in cache.table_behind(nodes).groups] == [8, 9]
    for node in nodes[7:]:
        cache.withdraw(node, *node.blocks)
    assert not any(node.is_found for node in nodes), "they lead nowhere any more"
    assert hit(cache) == 0 and not cache.index._roots


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_part_of_a_block_needs_it_of_every_group(lacks):
    cache = PrefixCache(40, 4, windows=(None, 8, 4))
    _, nodes = compute(cache, 16)
    tokens = np.concatenate([TOKENS[:14], TOKENS[50:55]])
    chain = cache.match("", tokens, [], 18)
    assert chain == nodes[:3]
    assert cache.match_part("", chain, tokens, 18, ()) == (nodes[3], 2)
    table = cache.table_behind(chain, nodes[3], 2)
    assert [each.first for each in table.groups] == [0, 1, 2] and table.length == 14
    copies = table.append(1)
    assert [source for source, _ in copies] == nodes[3].blocks
    table.truncate(0)
    cache.withdraw(nodes[3], *[b if g == lacks else -9 for g, b in enumerate(nodes[3].blocks)])
    assert cache.match_part("", chain, tokens, 18, ()) is None


def test_routers_are_told_of_a_position_while_all_full_groups_have_it():
    cache, log = PrefixCache(40, 4, windows=(None, 8)), BlockLog()
    cache.publish_events(log, NAMESPACE)
    _, nodes = compute(cache, 16)
    stored = log.take().stored
    assert sorted(stored) == sorted(node.key[:16] for node in nodes)
    cache.withdraw(nodes[3], GONE - 1, nodes[3].blocks[1])
    assert not log
    cache.withdraw(nodes[3], nodes[3].blocks[0])
    assert log.take().removed == [nodes[3].key[:16]]
