"""The router beside one that is slow and obvious, and what it promises in plain cases."""

from collections import Counter

import pytest
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.kv.events import BlockEvents
from quire.replicas.baselines import RandomRouter, RoundRobinRouter
from quire.replicas.prefix_router import PrefixRouter

BLOCK_SIZE, SLACK = 4, 10.0


def keys(*numbers):
    return [bytes([number]) * 16 for number in numbers]


@pytest.fixture
def router():
    router = PrefixRouter(BLOCK_SIZE, max_blocks=8, slack=SLACK)
    for name in "abc":
        router.join(name)
    return router


def idle(names="abc"):
    return dict.fromkeys(names, 0.0)


class TestChoice:
    def test_the_longest_cached_prefix_wins(self, router):
        router.apply("a", BlockEvents(stored=keys(1)))
        router.apply("b", BlockEvents(stored=keys(1, 2, 3)))
        router.apply("c", BlockEvents(stored=keys(1, 3, 4)))  # 3 without 2 is no prefix
        assert router.choose(keys(1, 2, 3, 4), idle()) == ("b", 3)

    def test_an_overloaded_replica_leaves_it_to_the_next_longest_prefix(self, router):
        router.apply("a", BlockEvents(stored=keys(1, 2, 3)))
        router.apply("b", BlockEvents(stored=keys(1)))
        just = SLACK + 3 * BLOCK_SIZE
        assert router.choose(keys(1, 2, 3), {**idle(), "a": just}) == ("a", 3)
        assert router.choose(keys(1, 2, 3), {**idle(), "a": just + 1}) == ("b", 1)
        assert router.choose(keys(1, 2, 3), {"a": just + 1, "b": just + 1, "c": 0}) == ("c", 0)

    def test_equals_take_turns(self, router):
        chosen = [router.choose(keys(1), idle()).replica for _ in range(6)]
        assert sorted(chosen[:3]) == ["a", "b", "c"] and chosen[3:] == chosen[:3]

    def test_a_replica_that_is_left_out_gets_nothing(self, router):
        router.apply("a", BlockEvents(stored=keys(1)))
        assert router.choose(keys(1), idle("bc")).replica in ("b", "c")

    def test_a_prompt_without_a_full_block_goes_to_the_least_loaded(self, router):
        assert router.choose([], {"a": 2.0, "b": 1.0, "c": 3.0}) == ("b", 0)


class TestExpected:
    def test_those_who_follow_a_request_go_the_same_way_before_its_blocks_are_told(self, router):
        sent = router.begin("b", keys(1, 2))
        assert router.choose(keys(1, 2, 3), idle()) == ("b", 2)
        router.end(sent)
        assert router.choose(keys(1, 2, 3), idle()).num_blocks == 0

    def test_what_was_told_meanwhile_stays(self, router):
        sent = router.begin("b", keys(1, 2))
        router.apply("b", BlockEvents(stored=keys(1)))
        router.end(sent)
        assert router.choose(keys(1, 2), idle()) == ("b", 1)

    def test_a_request_that_outlives_its_replica_changes_nothing_for_its_successor(self, router):
        old = router.begin("b", keys(1))
        router.join("b")  # it was started again
        assert router.choose(keys(1), idle()).num_blocks == 0
        new = router.begin("b", keys(1))
        router.end(old)
        assert router.choose(keys(1), idle()) == ("b", 1)
        router.end(new)
        assert router.choose(keys(1), idle()).num_blocks == 0


class TestBounds:
    def test_what_was_not_asked_for_the_longest_is_forgotten_first(self, router):
        router.apply("a", BlockEvents(stored=keys(*range(8))))
        router.end(router.begin("a", keys(0, 1, 2)))
        router.apply("a", BlockEvents(stored=keys(8, 9)))
        assert router.num_blocks("a") == 8
        assert router.choose(keys(0, 1, 2), idle()) == ("a", 3)
        assert router.choose(keys(3), idle()).num_blocks == 0

    def test_nothing_is_left_of_those_who_are_gone(self, router):
        for name in "abc":
            router.apply(name, BlockEvents(stored=keys(1, 2)))
            router.begin(name, keys(2, 3))
            router.leave(name)
        assert not router._holders and not router._expecters

    def test_expected_blocks_are_bounded_too(self, router):
        sent = [router.begin("a", keys(*range(at, at + 5))) for at in range(0, 50, 5)]
        assert len(router._expecters) == 8
        for each in sent:
            router.end(each)
        assert not router._expecters

    def test_the_walk_does_not_grow_with_the_replicas(self):
        """A thousand replicas have the same prefix: each block is looked up once, not a thousand
        times."""

        looked_up = Counter()

        class Counted(bytes):
            def __hash__(self):
                looked_up[bytes(self)] += 1
                return super().__hash__()

        router = PrefixRouter(BLOCK_SIZE)
        names = [f"replica-{i}" for i in range(1000)]
        prompt = [i.to_bytes(16, "little") for i in range(100)]
        for name in names:
            router.join(name)
            router.apply(name, BlockEvents(stored=prompt[:50]))
        router.apply(names[700], BlockEvents(stored=prompt[50:60]))
        asked = [Counted(key) for key in prompt]
        assert router.choose(asked, dict.fromkeys(names, 0.0)) == ("replica-700", 60)
        # Each among the blocks that are held, and among those that are expected.
        assert looked_up == dict.fromkeys(prompt[:61], 2)


NAMES = st.sampled_from("abcd")
KEYS = st.lists(st.integers(0, 5), max_size=5, unique=True).map(lambda numbers: keys(*numbers))


class RouterMachine(RuleBasedStateMachine):
    """The model: a set of held keys and a list of expected prompts for each replica."""

    def __init__(self):
        super().__init__()
        self.router = PrefixRouter(BLOCK_SIZE, slack=SLACK)
        self.held = {}
        self.sent = []  # (replica, prompt, what the router gave)

    @rule(name=NAMES)
    def join(self, name):
        self.router.join(name)
        self.held[name] = set()
        self.sent = [each for each in self.sent if each[0] != name]

    @rule(name=NAMES)
    def leave(self, name):
        self.router.leave(name)
        self.held.pop(name, None)
        self.sent = [each for each in self.sent if each[0] != name]

    @rule(name=NAMES, cleared=st.booleans(), removed=KEYS, stored=KEYS)
    def apply(self, name, cleared, removed, stored):
        removed = [key for key in removed if key not in stored]
        self.router.apply(name, BlockEvents(cleared, removed, stored))
        if name in self.held:
            kept = set() if cleared else self.held[name]
            self.held[name] = (kept - set(removed)) | set(stored)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), prompt=KEYS)
    def begin(self, data, prompt):
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.sent.append((name, prompt, self.router.begin(name, prompt)))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def end(self, data):
        at = data.draw(st.integers(0, len(self.sent) - 1))
        self.router.end(self.sent.pop(at)[2])

    def prefix(self, name, prompt):
        expected = {key for who, keys, _ in self.sent if who == name for key in keys}
        count = 0
        for key in prompt:
            if key not in self.held[name] | expected:
                break
            count += 1
        return count

    @precondition(lambda self: self.held)
    @rule(prompt=KEYS, data=st.data())
    def choose(self, prompt, data):
        some = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        loads = {name: data.draw(st.integers(0, 60)) for name in sorted(some)}
        choice = self.router.choose(prompt, loads)
        count = {name: self.prefix(name, prompt) for name in loads}
        least = min(loads.values())
        fit = [n for n in loads if loads[n] <= least + SLACK + count[n] * BLOCK_SIZE and count[n]]
        longest = max((count[n] for n in fit), default=0)
        equals = [n for n in fit if count[n] == longest] or list(loads)
        assert choice.replica in equals
        assert loads[choice.replica] == min(loads[n] for n in equals)
        assert choice.num_blocks == longest

    @invariant()
    def nothing_else_is_remembered(self):
        for name, held in self.held.items():
            assert self.router.num_blocks(name) == len(held)
        assert set(self.router._holders) == set().union(*self.held.values())
        assert set(self.router._expecters) == {key for _, keys, _ in self.sent for key in keys}


TestAgainstTheModel = RouterMachine.TestCase
TestAgainstTheModel.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)


class TestBaselines:
    def test_random_spreads_over_all_and_only_those_that_are_offered(self):
        router = RandomRouter(seed=1)
        chosen = [router.choose(keys(1), idle("ab")).replica for _ in range(200)]
        assert 60 < chosen.count("a") < 140 and set(chosen) == {"a", "b"}

    def test_round_robin_goes_round(self):
        router = RoundRobinRouter()
        assert [router.choose([], idle()).replica for _ in range(4)] == ["a", "b", "c", "a"]
