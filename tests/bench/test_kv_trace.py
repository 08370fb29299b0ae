"""`quire bench kv --trace`: reading a trace, Belady beside slow oracles, and the command."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.cli import main
from quire.bench import request_trace
from quire.bench.kv import belady
from quire.bench.kv.belady import NEVER, count_belady_hits, find_next_uses
from quire.bench.kv.block_trace import Trace, read_trace
from quire.bench.kv.replay import cached_prefix, count_hits
from quire.errors import ConfigError
from quire.kv.policy import LearnedPolicy, LRUPolicy

names = st.one_of(st.integers(0, 4), st.sampled_from("ab"))
requests_of_names = st.lists(st.lists(names, max_size=6), max_size=25)
capacities = st.integers(1, 8)


def trace_of(requests):
    trace = Trace()
    for request in requests:
        trace.add(request)
    return trace


def belady_hits(trace, capacity):
    return count_belady_hits(trace, find_next_uses(trace.blocks, trace), capacity)


class TestNumbers:
    @given(requests_of_names)
    def test_a_number_stands_for_a_name_and_all_before_it(self, requests):
        trace = trace_of(requests)
        chains = list(trace)
        prefixes, numbers = {}, set()
        for request, chain in zip(requests, chains, strict=True):
            assert len(chain) == len(request)
            for at, number in enumerate(chain, start=1):
                prefix = tuple((type(name), name) for name in request[:at])
                assert prefixes.setdefault(prefix, number) == number
                numbers.add(number)
        assert len(numbers) == len(prefixes) == trace.num_distinct
        assert trace.num_blocks == sum(map(len, requests)) and len(trace) == len(requests)

    def test_one_name_after_itself(self):
        assert list(trace_of([[7, 7, 7], [7, 7]])) == [[0, 1, 2], [0, 1]]


def slow_belady(requests, capacity):
    """The same choice, looked up by reading on from where the trace stands."""
    cached, hits = set(), 0
    for now, request in enumerate(requests):
        hits += cached_prefix(request, cached)
        cached |= set(request)

        def next_use(block, now=now):
            later = range(now + 1, len(requests))
            return next((number for number in later if block in requests[number]), NEVER)

        while len(cached) > capacity:
            cached.remove(max(cached, key=lambda block: (next_use(block), -block)))
    return hits


def most_hits(blocks, capacity):
    """The best of all choices there are, for requests of one block each."""

    @cache
    def best(at, cached):
        if at == len(blocks):
            return 0
        here = cached | {blocks[at]}
        choices = [here] if len(here) <= capacity else [here - {block} for block in here]
        return (blocks[at] in cached) + max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


class TestBelady:
    @given(requests_of_names, capacities)
    def test_chooses_as_the_slow_one(self, requests, capacity):
        trace = trace_of(requests)
        assert belady_hits(trace, capacity) == slow_belady(list(trace), capacity)

    @given(requests_of_names, capacities)
    def test_with_a_heap_that_is_cleaned_all_the_time(self, requests, capacity):
        trace = trace_of(requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(belady, "SMALL_HEAP", -1)
            assert belady_hits(trace, capacity) == slow_belady(list(trace), capacity)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
    def test_no_choice_hits_more_where_requests_have_one_block(self, blocks, capacity):
        trace = trace_of([[block] for block in blocks])
        found = belady_hits(trace, capacity)
        assert found == most_hits(list(trace.blocks), capacity)
        for policy in (LRUPolicy(capacity), LearnedPolicy(capacity)):
            assert count_hits(policy, trace) <= found

    @given(requests_of_names)
    def test_with_room_for_all_only_first_uses_miss(self, requests):
        trace = trace_of(requests)
        most = trace.num_blocks - trace.num_distinct
        room = max(1, trace.num_distinct)
        assert belady_hits(trace, room) == most
        assert count_hits(LRUPolicy(room), trace) == most
        assert count_hits(LearnedPolicy(room), trace) == most


def test_a_replay_by_hand():
    """Room for three: 4 and 3 push each other out behind 1 2, which hit until 5 6 7 come."""
    trace = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5, 6, 7], [1, 2]]
    assert count_hits(LRUPolicy(3), trace) == 4


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "requests.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write


REQUESTS = [[1, 2, 3], [1, 2, 4], [9], [1, 2, 3]]


class TestCommand:
    def run(self, capsys, *flags):
        status = main(["bench", "kv", *flags])
        return status, *capsys.readouterr()

    def test_a_table(self, capsys, write):
        path = write(*(json.dumps({"hash_ids": ids}).encode() for ids in REQUESTS))
        status, out, err = self.run(capsys, "--trace", path, "--capacity", "2,100")
        assert status == 0
        assert all(re.match(r"  kv: \d+ of 24 requests, ", line) for line in err.splitlines())
        assert "4 requests for 10 blocks, 5 of them distinct" in out
        [row] = [line.split() for line in out.splitlines() if line.lstrip().startswith("100 ")]
        assert row[1:4] == ["50.0", "50.0", "50.0"]

    def test_json_is_one_line_for_each_capacity(self, capsys, write):
        path = write(*(json.dumps({"hash_ids": ids}).encode() for ids in REQUESTS))
        status, out, err = self.run(capsys, "--trace", path, "--capacity", "2,100", "--json")
        small, large = map(json.loads, out.splitlines())
        assert status == 0 and "would hit" in err
        assert (small["capacity"], large["capacity"]) == (2, 100)
        assert large["lru"] == large["policy"] == large["belady"] == 50.0
        assert small["belady"] == 40.0 and small.keys() >= {"lru", "policy"}

    def test_json_into_a_file(self, capsys, write, tmp_path):
        path = write(b'{"hash_ids": ["x", "y"]}', b"", b'{"hash_ids": ["x"], "timestamp": 5}')
        figures = tmp_path / "figures.json"
        status, out, _ = self.run(capsys, "--trace", path, "--json", str(figures))
        assert status == 0 and "3,000" in out
        assert json.loads(figures.read_text())["belady"] == pytest.approx(100 / 3)

    @pytest.mark.parametrize(
        ("lines", "sentence"),
        [
            ([b'{"hash_ids": [1]}', b"", b"{oops"], "line 3 of --trace {} is not JSON"),
            ([b"\xff\xfe{"], "line 1 of --trace {} is not JSON"),
            ([b"[" * 100_000], "line 1 of --trace {} is not JSON"),
            ([b"[1, 2]"], "line 1 of --trace {} is no JSON object"),
            ([b'{"hash_ids": 7}'], "line 1 of --trace {} has no list `hash_ids`"),
            ([b'{"hash_ids": [1.5]}'], "line 1 of --trace {} has no list `hash_ids`"),
            ([b'{"hash_ids": [true]}'], "line 1 of --trace {} has no list `hash_ids`"),
            ([b'{"ids": []}'], "line 1 of --trace {} has no list `hash_ids`"),
            ([], "--trace {} has no blocks"),
            ([b'{"hash_ids": []}'], "--trace {} has no blocks"),
        ],
    )
    def test_a_bad_file_is_one_sentence(self, capsys, write, lines, sentence):
        path = write(*lines)
        status, out, err = self.run(capsys, "--trace", path)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert sentence.format(path) in err

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            ("--trace nowhere.jsonl", "nowhere.jsonl cannot be read: No such file or directory"),
            ("--trace .", "cannot be read: Is a directory"),
            ("--trace x --capacity many", "whole numbers from 1 with commas, not 'many'"),
            ("--trace x --capacity 0", "whole numbers from 1 with commas, not '0'"),
            ("--trace x --capacity ,", "whole numbers from 1 with commas, not ','"),
            ("--trace x --workload restore", "leave out --workload"),
            ("--capacity 30", "--capacity is for a trace; give --trace FILE"),
        ],
    )
    def test_a_wrong_flag_is_one_sentence(self, capsys, flags, sentence):
        status, out, err = self.run(capsys, *flags.split())
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert sentence in err

    def test_a_file_without_lines_does_not_fill_the_memory(self, write, monkeypatch):
        monkeypatch.setattr(request_trace, "LONGEST_LINE", 64)
        path = write(b'{"hash_ids": [' + b"1, " * 100 + b"1]}")
        with pytest.raises(ConfigError, match=r"line 1 of --trace .* is not JSON"):
            read_trace(path)
