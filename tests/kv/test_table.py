import numpy as np
import pytest

from quire.kv.allocator import BlockAllocator, OutOfBlocks
from quire.kv.table import BlockTable


@pytest.fixture
def allocator():
    return BlockAllocator(16)


def test_prefill_takes_as_many_blocks_as_it_needs_and_decode_one_when_the_last_is_full(allocator):
    table = BlockTable(allocator, 4)
    table.append(7)
    assert len(table) == 2
    table.append(1)
    assert len(table) == 2
    table.append(1)
    assert len(table) == 3 and table.length == 9


def test_slots_follow_the_table():
    table = BlockTable(BlockAllocator(8), 4)
    table.append(10)
    ids = table.ids.tolist()
    expected = [ids[p // 4] * 4 + p % 4 for p in range(2, 10)]
    assert table.slots(2, 10).tolist() == expected


def test_fork_shares_and_the_first_write_into_a_shared_last_block_copies_it(allocator):
    table = BlockTable(allocator, 4)
    table.append(6)
    last = int(table.ids[-1])
    twin = table.fork()
    assert twin.blocks_needed(1) == 1
    copies = twin.append(1)
    assert copies == [(last, int(twin.ids[-1]))]
    assert twin.ids[0] == table.ids[0] and twin.ids[1] != table.ids[1]
    assert table.append(1) == []  # the other is the only owner now, and writes in place
    assert allocator.ref_counts[last] == 1


def test_a_full_last_block_is_not_copied(allocator):
    table = BlockTable(allocator, 4)
    table.append(8)
    twin = table.fork()
    assert twin.append(1) == [] and len(twin) == 3


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9])
def test_truncate_gives_back_what_lies_past_the_new_length(allocator, length):
    table = BlockTable(allocator, 4)
    table.append(9)
    table.truncate(length)
    assert len(table) == -(-length // 4)
    assert allocator.num_in_use == len(table)
    table.append(9 - length)
    assert len(table) == 3


def test_an_append_that_does_not_fit_changes_nothing():
    allocator = BlockAllocator(2)
    table = BlockTable(allocator, 4)
    table.append(4)
    with pytest.raises(OutOfBlocks):
        table.append(8)
    assert table.length == 4 and allocator.num_free == 1


def test_adopted_blocks_are_shared(allocator):
    blocks = allocator.allocate(2)
    table = BlockTable(allocator, 4)
    table.adopt(blocks)
    assert table.length == 8 and all(allocator.ref_counts[b] == 2 for b in blocks)


def test_a_long_table_grows(allocator):
    allocator = BlockAllocator(1000)
    table = BlockTable(allocator, 1)
    for _ in range(1000):
        table.append(1)
    assert np.array_equal(table.ids, np.arange(1000))


def test_a_block_that_can_be_found_is_copied_before_it_is_written_again(allocator):
    table = BlockTable(allocator, 4)
    table.append(8)
    found = int(table.ids[1])
    allocator.mark_keyed(found)
    table.truncate(6)
    assert table.append(2) == [(found, int(table.ids[1]))]
    assert allocator.num_cached == 1 and found != table.ids[1]


def test_a_block_of_which_a_part_is_wanted_is_copied_on_the_first_write(allocator):
    owner = BlockTable(allocator, 4)
    owner.append(8)
    whole, source = owner.ids.tolist()
    allocator.mark_keyed(source)
    owner.truncate(4)  # now it is cached, and no table holds it
    table = BlockTable(allocator, 4)
    table.adopt([whole, source], length=6)
    assert table.length == 6 and table.blocks_needed(1) == 1 and table.blocks_needed(3) == 2
    [(copied, target)] = table.append(1)
    assert copied == source and table.ids.tolist() == [whole, target]
    assert allocator.ref_counts[source] == 0 and allocator.is_keyed(source)
    assert not allocator.is_keyed(target) and table.append(1) == []
