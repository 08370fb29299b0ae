"""Sends a request where the longest prefix of its prompt is cached, unless too much waits there.

    key of block 0   ─►  replicas {A, B, C}    ─┐ a walk along the prompt keeps those that have
    key of block 1   ─►  replicas {A, B}        │ every block so far, and notes who fell out where:
    key of block 2   ─►  replicas {A, D}       ─┘ A holds 3 blocks, B 2, C 1; D's do not count

Sets of replicas are the bits of an int, so the walk is as long as the prompt, however many replicas
there are. From the longest prefix to the shortest, the first replica is taken that is not
overloaded: whose load is above the least of all by no more than `slack` and what its blocks save.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from quire.kv.events import BlockEvents
from quire.replicas.routing import RoutingDecision, Sent

MOST_BLOCKS = 1 << 20  # known of one replica: 16 million tokens in blocks of 16
SLACK = 2048.0  # tokens: about a step's worth


class _ReplicaBlocks:
    """What is known of one, from when it joined until it leaves."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.is_here = True
        self.held: OrderedDict[bytes, None] = OrderedDict()  # longest not asked for first
        self.expected: Counter[bytes] = Counter()  # by how many requests that are under way


class _Sent(Sent):
    def __init__(self, replica: _ReplicaBlocks, keys: Sequence[bytes]) -> None:
        self.replica = replica
        self.keys = keys


class PrefixRouter:
    """Knows at most `max_blocks` held blocks of a replica, and expects at most as many more."""

    def __init__(
        self, block_size: int, max_blocks: int = MOST_BLOCKS, slack: float = SLACK
    ) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._slack = slack
        self._replicas: dict[str, _ReplicaBlocks] = {}
        self._names: list[str | None] = []  # by slot
        self._holders: dict[bytes, int] = {}
        self._expecters: dict[bytes, int] = {}
        self._turn = 0  # among equals, the first slot from here on

    def num_blocks(self, replica: str) -> int:
        """How many blocks it is known to hold."""
        return len(self._replicas[replica].held)

    # --- replicas and their blocks ----------------------------------------------------------------

    def join(self, replica: str) -> None:
        self.leave(replica)
        if None in self._names:
            slot = self._names.index(None)
            self._names[slot] = replica
        else:
            slot = len(self._names)
            self._names.append(replica)
        self._replicas[replica] = _ReplicaBlocks(slot)

    def leave(self, replica: str) -> None:
        gone = self._replicas.pop(replica, None)
        if gone is not None:
            self._forget_all(gone)
            for key in gone.expected:
                _drop(self._expecters, key, gone.bit)
            self._names[gone.slot] = None
            gone.is_here = False

    def apply(self, replica: str, events: BlockEvents) -> None:
        who = self._replicas.get(replica)
        if who is None:
            return  # its last words, after it was given up
        if events.cleared:
            self._forget_all(who)
        for key in events.removed:
            if who.held.pop(key, self) is None:
                _drop(self._holders, key, who.bit)
        for key in events.stored:
            who.held[key] = None
            who.held.move_to_end(key)
            self._holders[key] = self._holders.get(key, 0) | who.bit
            if len(who.held) > self._max_blocks:
                oldest, _ = who.held.popitem(last=False)
                _drop(self._holders, oldest, who.bit)

    def _forget_all(self, who: _ReplicaBlocks) -> None:
        for key in who.held:
            _drop(self._holders, key, who.bit)
        who.held.clear()

    # --- requests ---------------------------------------------------------------------------------

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, float]) -> RoutingDecision:
        least = min(loads.values())
        for num_blocks, replicas in reversed(self._prefixes(keys)):
            most = least + self._slack + num_blocks * self._block_size
            near = [name for name in self._named(replicas) if loads.get(name, most + 1) <= most]
            if near:
                return self._least_loaded(near, loads, num_blocks)
        return self._least_loaded(list(loads), loads, 0)

    def _prefixes(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Replicas by how many blocks of the prompt they hold, the fewest first."""
        found: list[tuple[int, int]] = []
        having = -1  # all of them
        for at, key in enumerate(keys):
            still = having & (self._holders.get(key, 0) | self._expecters.get(key, 0))
            if still != having and at:
                found.append((at, having & ~still))
            having = still
            if not having:
                return found
        return [*found, (len(keys), having)] if keys else []

    def _least_loaded(
        self, names: list[str], loads: Mapping[str, float], num_blocks: int
    ) -> RoutingDecision:
        """The next in turn among the replicas with the least load."""
        least = min(loads[name] for name in names)
        equals = [self._replicas[name].slot for name in names if loads[name] == least]
        slot = min(equals, key=lambda slot: (slot < self._turn, slot))
        self._turn = slot + 1
        name = self._names[slot]
        assert name is not None
        return RoutingDecision(name, num_blocks)

    def _named(self, replicas: int) -> Iterator[str]:
        """By its digits: to shift a number of a thousand bits for each takes ten times as long."""
        for slot, digit in enumerate(reversed(f"{replicas:b}")):
            if digit == "1":
                name = self._names[slot]
                assert name is not None
                yield name

    def begin(self, replica: str, keys: Sequence[bytes]) -> Sent:
        who = self._replicas[replica]
        for key in reversed(keys):  # a prefix without its first block is none: those stay longest
            if key in who.held:
                who.held.move_to_end(key)
        keys = keys[: max(0, self._max_blocks - len(who.expected))]
        who.expected.update(keys)
        for key in keys:
            self._expecters[key] = self._expecters.get(key, 0) | who.bit
        return _Sent(who, keys)

    def end(self, sent: Sent) -> None:
        assert isinstance(sent, _Sent)
        who, expected = sent.replica, sent.replica.expected
        if not who.is_here:
            return  # it left meanwhile, and perhaps another came with its name
        for key in sent.keys:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                _drop(self._expecters, key, who.bit)


def _drop(replicas_by_key: dict[bytes, int], key: bytes, bit: int) -> None:
    left = replicas_by_key[key] & ~bit
    if left:
        replicas_by_key[key] = left
    else:
        del replicas_by_key[key]
