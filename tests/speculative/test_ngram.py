"""N-gram drafts against the slow and obvious search."""

from __future__ import annotations

import random

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.allocator import BlockAllocator
from quire.kv.table import BlockTable
from quire.speculative.drafter import Wanted
from quire.speculative.ngram import CANDIDATES, LONGEST, RUN, SURE, NgramDrafter, NgramLookup

NO_BLOCKS = BlockTable(BlockAllocator(1), 4)


def longest_match(ids):
    """How many of the last tokens occur earlier with a token behind them."""
    for length in range(len(ids) - 1, RUN - 1, -1):
        end = ids[-length:]
        if any(ids[i : i + length] == end for i in range(len(ids) - length)):
            return length
    return 0


def array(ids):
    return np.array(ids, dtype=np.int32)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60), st.data())
def test_the_longest_match_whatever_comes_at_once(ids, first, data):
    """Few places in each sequence, so that all of them are compared."""
    lookup, known = NgramLookup(), min(first, len(ids))
    lookup.extend(array(ids[:known]))
    while known < len(ids):
        known += data.draw(st.integers(1, len(ids) - known))
        lookup.extend(array(ids[:known]))
    found, right = lookup.matched, longest_match(ids)
    places = sum(ids[i : i + RUN] == ids[-RUN:] for i in range(len(ids)))
    if right <= LONGEST and places < CANDIDATES:
        assert found == right
    assert found <= right
    if found:
        follow = lookup._follow
        assert ids[follow - found : follow] == ids[-found:] and follow < len(ids)


def test_it_says_what_came_next():
    drafter = NgramDrafter()
    ids = array([1, 2, 3, 4, 5, 6, 7, 9, 9, 1, 2, 3])
    assert not drafter.look("a", ids).is_ready  # three tokens agree: not yet sure
    outlook = drafter.look("a", array([*ids, 4]))
    assert outlook.is_ready
    [guess] = drafter.propose([Wanted("a", array([*ids, 4]), 3, NO_BLOCKS)])
    assert guess.tolist() == [5, 6, 7]


def test_a_repetition_goes_on():
    drafter = NgramDrafter()
    ids = array([5, 6] * 6)
    assert drafter.look("a", ids).is_ready
    [guess] = drafter.propose([Wanted("a", ids, 7, NO_BLOCKS)])
    assert guess.tolist() == [5, 6, 5, 6, 5, 6, 5]


def test_it_knows_how_often_it_would_have_been_right():
    drafter = NgramDrafter()
    ids = [*range(1, 20), 30, *range(1, 6)]
    drafter.look("a", array(ids))
    assert drafter.look("a", array([*ids, 6, 7, 8, 25]))[1:] == (3, 1)
    assert drafter.look("a", array([*ids, 6, 7, 8, 25, 26]))[1:] == (0, 0)


def test_nothing_is_kept_of_what_has_ended():
    drafter = NgramDrafter()
    for name in range(100):
        drafter.look(name, array([1, 2, 3, 4]))
        drafter.forget(name)
        drafter.forget(name)
    assert not drafter._lookups


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_shortest_prompts(count):
    drafter = NgramDrafter()
    assert not drafter.look("a", array(range(count))).is_ready
    assert drafter.propose([Wanted("a", array(range(count)), 4, NO_BLOCKS)])[0].tolist() == []


def test_work_for_a_token_does_not_grow_with_the_sequence():
    """Each token takes in one place and compares at most so many, however long the sequence is."""
    choose = random.Random(1)
    ids = array([choose.randrange(50_000) for _ in range(20_000)])
    lookup = NgramLookup()
    lookup.extend(ids[:10_000])
    lookup.extend(ids)
    assert len(lookup._earlier) == 20_001 and lookup.matched < SURE
