import pytest

from quire.kv.allocator import BlockAllocator, OutOfBlocks


def counts(allocator):
    return allocator.num_free, allocator.num_cached, allocator.num_in_use


def test_allocate_takes_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks were asked for and 1 are left"):
        allocator.allocate(2)
    assert counts(allocator) == (1, 0, 3)


def test_a_keyed_block_stays_cached_and_can_be_shared_again():
    allocator = BlockAllocator(2)
    [block] = allocator.allocate(1)
    allocator.mark_keyed(block)
    allocator.release([block])
    assert counts(allocator) == (1, 1, 0)
    allocator.share([block])
    assert allocator.ref_counts[block] == 1 and counts(allocator) == (1, 0, 1)


def test_cached_blocks_go_only_when_no_free_one_is_left_and_the_oldest_first():
    allocator = BlockAllocator(4)
    evicted = []
    allocator.on_evict = evicted.append
    a, b, c = allocator.allocate(3)
    for block in (a, b, c):
        allocator.mark_keyed(block)
    allocator.release([c, b, a])
    assert allocator.allocate(1) == [3] and evicted == []
    allocator.touch([c])
    assert allocator.allocate(2) == [b, a] and evicted == [b, a]


def test_tails_are_evicted_before_heads():
    allocator = BlockAllocator(3)
    head, middle, tail = blocks = allocator.allocate(3)
    for block in blocks:
        allocator.mark_keyed(block)
    allocator.release(blocks[::-1])
    assert [allocator.allocate(1)[0] for _ in range(3)] == [tail, middle, head]


def test_a_double_release_raises():
    allocator = BlockAllocator(1)
    [block] = allocator.allocate(1)
    allocator.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release([block])


def test_sharing_a_free_block_is_a_bug():
    with pytest.raises(KeyError):
        BlockAllocator(1).share([0])


def test_unkey_frees_a_cached_block_and_leaves_a_used_one():
    allocator = BlockAllocator(2)
    cached, used = allocator.allocate(2)
    allocator.mark_keyed(cached)
    allocator.mark_keyed(used)
    allocator.release([cached])
    allocator.unkey(cached)
    allocator.unkey(used)
    assert counts(allocator) == (1, 0, 1)
    allocator.release([used])
    assert counts(allocator) == (2, 0, 0)


def test_what_is_released_to_be_evicted_first_goes_first_and_can_be_rescued():
    allocator = BlockAllocator(4)
    evicted = []
    allocator.on_evict = evicted.append
    a, b, c, d = allocator.allocate(4)
    for block in (a, b, c, d):
        allocator.mark_keyed(block)
    allocator.release([a, b])
    allocator.release([c, d], evict_first=True)
    assert allocator.num_cached == allocator.num_available == 4
    allocator.share([c])
    allocator.release([c])  # by another that had a use for it: like any other now
    assert allocator.allocate(3) == [d, a, b]
    assert evicted == [d, a, b]


def test_what_is_evicted_may_take_others_along():
    allocator = BlockAllocator(3)
    a, b, c = allocator.allocate(3)
    partners = {a: b, b: a}
    for block in (a, b, c):
        allocator.mark_keyed(block)
    allocator.release([c, a, b])

    def evict(block):
        if block in partners:
            allocator.evict_along(partners[block])

    allocator.on_evict = evict
    assert allocator.allocate(3) == [c, a, b]
    assert allocator.num_evicted == 3
    for block in (a, b, c):
        allocator.mark_keyed(block)
    allocator.release([a, b, c], evict_first=True)
    assert allocator.evict_cached() == 3
    assert allocator.num_free == 3 and allocator.num_cached == 0
