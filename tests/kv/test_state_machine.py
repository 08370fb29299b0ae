"""Random operations on allocator, tables and index together; SPEC's invariants after each."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kv.allocator import OutOfBlocks
from quire.kv.prefix import PrefixCache

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Holder:
    """A sequence as the scheduler treats it: tokens, a table over them, the published chain."""

    def __init__(self, cache, tokens):
        self.tokens = list(tokens)
        self.table = cache.new_table()
        self.nodes = []


class PagingMachine(RuleBasedStateMachine):
    """`content` is the model of the pool: what the KV of each slot was computed from."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
        self.holders = []
        self.content = {}

    def pick(self, data):
        return data.draw(st.sampled_from(self.holders))

    def write(self, holder, start, copies):
        for source, target in copies:
            for offset in range(BLOCK_SIZE):
                key = source * BLOCK_SIZE + offset
                self.content[target * BLOCK_SIZE + offset] = self.content.get(key)
        counts = self.cache.allocator.ref_counts
        for position, slot in enumerate(holder.table.slots(start, holder.table.length), start):
            block = int(slot) // BLOCK_SIZE
            assert counts[block] == 1, "a block with several owners was written"
            assert not self.cache.allocator.is_keyed(block), "a block others can find was written"
            self.content[int(slot)] = tuple(holder.tokens[: position + 1])

    def grow(self, holder, tokens):
        start = holder.table.length
        holder.tokens += tokens
        try:
            copies = holder.table.append(len(tokens))
        except OutOfBlocks:
            del holder.tokens[start:]
            return
        self.write(holder, start, copies)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens):
        holder = Holder(self.cache, [])
        ids = np.array(tokens, dtype=np.int32)
        holder.nodes = self.cache.match("", ids, [], len(tokens) - 1)
        blocks = [node.block for node in holder.nodes]
        length = len(blocks) * BLOCK_SIZE
        part = self.cache.match_part("", holder.nodes, ids, len(tokens) - 1, ())
        if part is not None:
            node, count = part
            assert 0 < count < len(tokens) - length
            blocks, length = [*blocks, node.block], length + count
        holder.table.adopt(blocks, length)
        holder.tokens = tokens[:length]
        for position, slot in enumerate(holder.table.slots(0, holder.table.length)):
            assert self.content[int(slot)] == tuple(tokens[: position + 1]), "a foreign block"
        self.holders.append(holder)
        self.grow(holder, tokens[holder.table.length :])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data, tokens):
        self.grow(self.pick(data), tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data):
        holder = self.pick(data)
        start, stop = len(holder.nodes), holder.table.length // BLOCK_SIZE
        tokens = holder.tokens[start * BLOCK_SIZE : stop * BLOCK_SIZE]
        blocks = holder.table.ids[start:stop].tolist()
        self.cache.publish("", holder.nodes, np.array(tokens, dtype=np.int32), blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data):
        holder = self.pick(data)
        twin = Holder(self.cache, holder.tokens)
        twin.table = holder.table.fork()
        twin.nodes = list(holder.nodes)
        self.holders.append(twin)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def roll_back(self, data):
        """Down to what is published: a key never covers a token that was taken back."""
        holder = self.pick(data)
        low = len(holder.nodes) * BLOCK_SIZE
        length = data.draw(st.integers(low, max(low, holder.table.length)))
        holder.table.truncate(length)
        del holder.tokens[length:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def withdraw(self, data):
        """A failed step takes its keys back before anyone forks off it."""
        holder = self.pick(data)
        counts = self.cache.allocator.ref_counts
        if holder.nodes and counts[holder.table.ids[len(holder.nodes) - 1]] == 1:
            node = holder.nodes.pop()
            self.cache.withdraw(node, int(holder.table.ids[len(holder.nodes)]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        holder = self.pick(data)
        holder.table.truncate(0)
        self.holders.remove(holder)

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def blocks_add_up(self):
        allocator = self.cache.allocator
        assert allocator.num_free + allocator.num_cached + allocator.num_in_use == NUM_BLOCKS
        assert len(set(allocator._free)) == allocator.num_free
        assert allocator.num_in_use == sum(count > 0 for count in allocator.ref_counts)

    @invariant()
    def reference_counts_are_the_number_of_tables(self):
        held = Counter(block for h in self.holders for block in h.table.ids.tolist())
        assert self.cache.allocator.ref_counts == [held[b] for b in range(NUM_BLOCKS)]

    @invariant()
    def keyed_blocks_are_those_of_the_index(self):
        allocator = self.cache.allocator
        keyed = {b for b in range(NUM_BLOCKS) if allocator.is_keyed(b)}
        assert keyed == set(self.cache.index._by_block)
        assert not keyed & set(allocator._free)

    @invariant()
    def every_holder_reads_its_own_tokens(self):
        for holder in self.holders:
            assert holder.table.length == len(holder.tokens)
            for position, slot in enumerate(holder.table.slots(0, holder.table.length)):
                assert self.content[int(slot)] == tuple(holder.tokens[: position + 1])

    def teardown(self):
        for holder in self.holders:
            holder.table.truncate(0)
        assert self.cache.allocator.num_in_use == 0
        assert self.cache.allocator.ref_counts == [0] * NUM_BLOCKS


TestPaging = PagingMachine.TestCase
TestPaging.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
