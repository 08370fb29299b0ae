"""Traces: equal names make equal blocks, copies share none, mistakes are one sentence."""

from __future__ import annotations

import json

import pytest
from simulated import talks

from quire.errors import ConfigError
from quire.simulate.runner import FIRST_DRAWN
from quire.simulate.trace import BLOCK_TOKENS, Trace, read_trace


def line(**changes):
    record = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps(record | changes) + "\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        return str(path)

    return write


def test_equal_names_make_equal_blocks(write):
    trace = read_trace(write(line() + line(hash_ids=[1, 3]) + line(hash_ids=["1", 2])))
    a, b, c = (each.token_ids() for each in trace.replay())
    assert len(a) == len(b) == len(c) == 600
    assert (a[:512] == b[:512]).all() and (a[512:] != b[512:]).all()
    assert (a[:512] != c[:512]).all()  # 1 and "1" are two names


def test_blocks_without_a_name_are_like_no_others(write):
    first, second = read_trace(write(2 * line(hash_ids=[1], input_length=1500))).replay()
    same = (first.token_ids() == second.token_ids()).reshape(-1, 500)
    assert same[0].all() and not same[2].any()


def test_times_are_in_order_and_from_nought(write):
    trace = read_trace(write(line(timestamp=9000) + line(timestamp=4000) + "\n"))
    assert [each.at for each in trace.replay()] == [0.0, 5.0]
    assert [each.at for each in trace.replay(speed=10)] == [0.0, 0.5]


def test_copies_share_nothing_and_the_load_is_theirs_together():
    trace = talks()
    found = list(trace.replay(copies=3, speed=2, seed=1))
    assert len(found) == 3 * len(trace)
    assert [each.at for each in found] == sorted(each.at for each in found)
    seen = {block for each in found for block in each.blocks.tolist()}
    assert len(seen) == 3 * trace.num_names and max(seen) < FIRST_DRAWN
    again = trace.replay(copies=3, speed=2, seed=1)
    assert [(each.at, each.blocks.tolist()) for each in again] == [
        (each.at, each.blocks.tolist()) for each in found
    ]


def test_as_many_as_are_asked_for(write):
    assert len(read_trace(write(5 * line()), most=2)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        (line() + "nonsense\n", "line 2 .* is not JSON"),
        (line() + "[1]\n", "line 2 .* is no JSON object"),
        (line(hash_ids=None), "hash_ids"),
        (line(input_length="many"), "no number `input_length`"),
        (line(output_length=-1), "no number `output_length`"),
        (line(timestamp=None), "no number `timestamp`"),
    ],
)
def test_mistakes_are_one_sentence(write, text, says):
    with pytest.raises(ConfigError, match=says) as error:
        read_trace(write(text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace("/no/such/trace.jsonl")


def test_more_copies_than_there_are_numbers():
    trace = Trace()
    trace.add(0.0, [], 1024 * BLOCK_TOKENS, 1)
    with pytest.raises(ConfigError, match="fewer --copies"):
        next(trace.replay(copies=1 << 21))
