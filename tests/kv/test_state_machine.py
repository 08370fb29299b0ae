"""Random operations on allocator, tables and index together; SPEC's invariants after each."""

from collections import Counter

import numpy as np
from effort import effort
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from plain_hits import plain_hit, visible

from quire.kv.allocator import OutOfBlocks
from quire.kv.hit_rule import first_needed
from quire.kv.index import GONE
from quire.kv.prefix import PrefixCache

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Holder:
    """A sequence as the scheduler treats it: tokens, a table over them, the published chain."""

    def __init__(self, cache, tokens):
        self.tokens = list(tokens)
        self.table = cache.new_table()
        self.nodes = []
        self.committed = 0  # tokens that are not taken back any more


class PagingMachine(RuleBasedStateMachine):
    """`content` is the model of the pool: what the KV of each slot was computed from, and where."""

    windows = (None,)
    num_blocks = NUM_BLOCKS

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(self.num_blocks, BLOCK_SIZE, windows=self.windows)
        self.holders = []
        self.content = {}
        self.below = set()  # a lower tier: by group, the tokens up to the end of each block

    def pick(self, data):
        return data.draw(st.sampled_from(self.holders))

    def write(self, holder, start, copies):
        for source, target in copies:
            for offset in range(BLOCK_SIZE):
                key = source * BLOCK_SIZE + offset
                self.content[target * BLOCK_SIZE + offset] = self.content.get(key)
        counts = self.cache.allocator.ref_counts
        for group, table in enumerate(holder.table.groups):
            for position, slot in enumerate(table.slots(start, table.length), start):
                block = int(slot) // BLOCK_SIZE
                assert counts[block] == 1, "a block with several owners was written"
                assert not self.cache.allocator.is_keyed(block), "a block others can find was"
                self.content[int(slot)] = (group, *holder.tokens[: position + 1])

    def check_read(self, holder, length):
        """Each group has what tokens from `length` on see of the tokens that are there."""
        for group, table in enumerate(holder.table.groups):
            seen = visible(length, self.windows[group])
            start = seen[0] if seen else length
            for position, slot in enumerate(table.slots(start, table.length), start):
                is_right = self.content[int(slot)] == (group, *holder.tokens[: position + 1])
                assert is_right, "a foreign block"

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
        self.check_longest(ids[: len(tokens) - 1], holder.nodes)
        length = len(holder.nodes) * BLOCK_SIZE
        part = self.cache.match_part("", holder.nodes, ids, len(tokens) - 1, ())
        node, count = part if part is not None else (None, 0)
        assert 0 <= count < len(tokens) - length
        holder.table = self.cache.table_behind(holder.nodes, node, count)
        holder.committed = length = length + count
        holder.tokens = tokens[:length]
        self.check_read(holder, length)
        self.holders.append(holder)
        self.grow(holder, tokens[length:])

    def check_longest(self, ids, found):
        chain = self.cache.index.match("", ids)
        length = plain_hit(
            *(len(chain), self.windows, BLOCK_SIZE),
            lambda group, place: chain[place].blocks[group] != GONE,
        )
        assert found == chain[:length]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data, tokens):
        self.grow(self.pick(data), tokens)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data):
        self.publish_full(self.pick(data))

    def publish_full(self, holder):
        start, stop = len(holder.nodes), holder.table.length // BLOCK_SIZE
        tokens = holder.tokens[start * BLOCK_SIZE : stop * BLOCK_SIZE]
        blocks = [t.ids[start - t.first : stop - t.first].tolist() for t in holder.table.groups]
        self.cache.publish("", holder.nodes, np.array(tokens, dtype=np.int32), *blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), prompt_len=st.integers(0, 14))
    def commit(self, data, prompt_len):
        """Up to some token: those behind it may be drafts, or of a later step."""
        holder = self.pick(data)
        self.publish_full(holder)
        length = data.draw(st.integers(holder.committed, holder.table.length))
        holder.table.give_back(length, prompt_len)
        holder.committed = length

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data):
        holder = self.pick(data)
        twin = Holder(self.cache, holder.tokens)
        twin.table = holder.table.fork()
        twin.nodes, twin.committed = list(holder.nodes), holder.committed
        self.holders.append(twin)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def roll_back(self, data):
        """Down to what is published: a key never covers a token that was taken back."""
        holder = self.pick(data)
        low = max(len(holder.nodes) * BLOCK_SIZE, holder.committed)
        length = data.draw(st.integers(low, max(low, holder.table.length)))
        holder.table.truncate(length)
        del holder.tokens[length:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def withdraw(self, data):
        """A failed step takes its keys back before a sequence forks off it."""
        holder = self.pick(data)
        counts, last = self.cache.allocator.ref_counts, len(holder.nodes) - 1
        if last * BLOCK_SIZE < holder.committed:
            return
        blocks = [int(table.ids[last - table.first]) for table in holder.table.groups]
        if all(counts[block] == 1 for block in blocks):
            self.cache.withdraw(holder.nodes.pop(), *blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        holder = self.pick(data)
        holder.table.truncate(0)
        self.holders.remove(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def offer(self, data):
        """A lower tier takes what is computed of a window, or some of it."""
        holder = self.pick(data)
        for group, table in enumerate(holder.table.groups):
            for place in range(table.first, holder.committed // BLOCK_SIZE):
                if data.draw(st.integers(0, 3)):
                    self.below.add((group, *holder.tokens[: (place + 1) * BLOCK_SIZE]))

    @precondition(lambda self: self.below)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), fails=st.integers(0, 12))
    def restore(self, tokens, fails):
        """Load what the longest hit of device and tier needs; one image may turn out damaged."""
        count = len(tokens) // BLOCK_SIZE
        ids = np.array(tokens[: count * BLOCK_SIZE], dtype=np.int32)
        chain = self.cache.index.match("", ids)

        def on_device(group, place):
            return place < len(chain) and chain[place].blocks[group] != GONE

        def has(group, place):
            end = (place + 1) * BLOCK_SIZE
            return on_device(group, place) or (group, *tokens[:end]) in self.below

        hit = plain_hit(count, self.windows, BLOCK_SIZE, has)
        needed = [
            (group, place)
            for group, window in enumerate(self.windows)
            for place in range(first_needed(hit * BLOCK_SIZE, window, BLOCK_SIZE), hit)
        ]
        shared = [chain[place].blocks[group] for group, place in needed if on_device(group, place)]
        lacking = [image for image in needed if not on_device(*image)]
        allocator = self.cache.allocator
        allocator.share(shared)
        if len(lacking) <= allocator.num_available:
            taken = allocator.allocate(len(lacking))
            loaded = dict(zip(lacking, taken, strict=True))
            if fails < len(lacking):
                del loaded[lacking[fails]]
            for (group, place), block in loaded.items():
                for offset in range(BLOCK_SIZE):
                    end = place * BLOCK_SIZE + offset + 1
                    self.content[block * BLOCK_SIZE + offset] = (group, *tokens[:end])
            of_groups = [
                {place: block for (group, place), block in loaded.items() if group == each}
                for each in range(len(self.windows))
            ]
            self.cache.publish_loaded("", ids[: hit * BLOCK_SIZE], of_groups)
            found = self.cache.match("", ids, [], len(ids))
            assert len(found) >= hit or fails < len(lacking)
            allocator.release(taken[::-1])
        allocator.release(shared)

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def blocks_add_up(self):
        allocator = self.cache.allocator
        assert allocator.num_free + allocator.num_cached + allocator.num_in_use == self.num_blocks
        assert len(set(allocator._free)) == allocator.num_free
        assert allocator.num_in_use == sum(count > 0 for count in allocator.ref_counts)

    @invariant()
    def reference_counts_are_the_number_of_tables(self):
        held = Counter(block for h in self.holders for block in h.table.ids.tolist())
        assert self.cache.allocator.ref_counts == [held[b] for b in range(self.num_blocks)]

    @invariant()
    def keyed_blocks_are_those_of_the_index(self):
        allocator = self.cache.allocator
        keyed = {b for b in range(self.num_blocks) if allocator.is_keyed(b)}
        assert keyed == set(self.cache.index._by_block)
        assert not keyed & set(allocator._free)

    @invariant()
    def windows_of_one_size_go_together(self):
        for node in self.cache.index._by_block.values():
            gone = {}
            for window, block in zip(self.windows, node.blocks, strict=True):
                gone.setdefault(window, set()).add(block == GONE)
            assert all(len(each) == 1 for each in gone.values())
            assert None not in gone or not node.is_found or gone[None] == {False}

    @invariant()
    def every_holder_reads_its_own_tokens(self):
        for holder in self.holders:
            assert holder.table.length == len(holder.tokens)
            self.check_read(holder, holder.committed)

    def teardown(self):
        for holder in self.holders:
            holder.table.truncate(0)
        assert self.cache.allocator.num_in_use == 0
        assert self.cache.allocator.ref_counts == [0] * self.num_blocks
        self.cache.clear()
        assert not self.cache.index


class FullAndWindow(PagingMachine):
    windows = (None, 5)
    num_blocks = 2 * NUM_BLOCKS


class TwoWindowsOfOneSize(PagingMachine):
    windows = (None, 6, 6)
    num_blocks = 3 * NUM_BLOCKS


class TwoWindows(PagingMachine):
    windows = (None, 3, 9)
    num_blocks = 2 * NUM_BLOCKS


class OnlyWindows(PagingMachine):
    windows = (8, 4)


class OneWindow(PagingMachine):
    windows = (6,)


TestPaging = PagingMachine.TestCase
TestPaging.settings = settings(max_examples=effort(60, 150), stateful_step_count=60, deadline=None)
TestFullAndWindow = FullAndWindow.TestCase
TestTwoWindowsOfOneSize = TwoWindowsOfOneSize.TestCase
TestTwoWindows = TwoWindows.TestCase
TestOnlyWindows = OnlyWindows.TestCase
TestOneWindow = OneWindow.TestCase
for case in (TestFullAndWindow, TestTwoWindowsOfOneSize, TestTwoWindows, TestOnlyWindows):
    case.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
del case
TestOneWindow.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
