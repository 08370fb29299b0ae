"""Requests and their moments: the same for the same seed, and caches find what they should."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from quire.api import cli
from quire.bench.engine.workloads import nano
from quire.bench.serve.flags import check_flags
from quire.bench.serve.prompts import WORDS, BlockPrompt
from quire.bench.serve.workload import arrivals, make_workload
from quire.errors import ConfigError


def workload(*flags):
    args = cli.make_parser().parse_args(["bench", "serve", *flags])
    check_flags(args)
    return make_workload(args)


class TestPrompts:
    def test_words_are_told_apart_by_a_byte(self):
        assert len(WORDS) == len(set(WORDS)) == 256

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 512, 513, 1000, 1024, 5000])
    def test_as_many_tokens_as_asked(self, length):
        prompt = BlockPrompt((1, 2), length, own="x")
        assert len(prompt.ids()) == len(prompt.text().split()) == length
        assert all(100 <= token <= 10_000 for token in prompt.ids())

    def test_equal_blocks_make_equal_text_and_others_differ_from_the_start(self):
        a, b = BlockPrompt((1, 2, 3), 1536, "a"), BlockPrompt((1, 2, 4), 1536, "b")
        assert a.ids()[:1024] == b.ids()[:1024] and a.ids()[1024:1032] != b.ids()[1024:1032]
        words = a.text().split(), b.text().split()
        assert words[0][:1024] == words[1][:1024] and words[0][1024:1032] != words[1][1024:1032]
        assert BlockPrompt((7,), 64, "").ids() != BlockPrompt(("7",), 64, "").ids()

    def test_what_blocks_do_not_cover_is_the_request_s_own(self):
        a, b = BlockPrompt((1,), 600, "a"), BlockPrompt((1,), 600, "b")
        assert a.ids()[:512] == b.ids()[:512] and a.ids()[512:] != b.ids()[512:]

    def test_many_blocks_none_alike(self):
        heads = {tuple(BlockPrompt((name,), 8, "").ids()) for name in range(20_000)}
        assert len(heads) == 20_000


class TestArrivals:
    def test_at_random_moments_of_the_given_rate(self):
        moments = list(itertools.islice(arrivals(8.0, seed=1), 4000))
        gaps = [b - a for a, b in itertools.pairwise(moments)]
        assert moments == sorted(moments) and min(gaps) > 0
        assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.06)
        assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # exponential

    def test_all_at_once(self):
        assert list(itertools.islice(arrivals(math.inf, 0), 3)) == [0.0, 0.0, 0.0]

    def test_the_seed_decides(self):
        first, again, other = (list(itertools.islice(arrivals(1, seed), 5)) for seed in (1, 1, 2))
        assert first == again != other


class TestRandom:
    def test_lengths_in_their_range_and_prompts_that_share_nothing(self):
        found = workload("--num-requests", "50", "--input-len", "10-20", "--output-len", "3-5")
        assert len(found.requests) == 50 and not found.as_ids
        assert {len(request.prompt.ids()) for request in found.requests} <= set(range(10, 21))
        assert {request.num_out for request in found.requests} == {3, 4, 5}
        assert len({tuple(request.prompt.ids()[:8]) for request in found.requests}) == 50

    def test_the_same_again_but_for_another_seed(self):
        assert workload("--num-requests", "5") == workload("--num-requests", "5")
        assert workload("--num-requests", "5") != workload("--num-requests", "5", "--seed", "1")


def test_nano_is_the_workload_of_that_name():
    found = workload("--workload", "nano")
    load = nano()
    assert [request.prompt.ids() for request in found.requests] == load.prompts
    assert [request.num_out for request in found.requests] == [out for _, out in load.lengths]
    assert found.as_ids and found.ignore_eos and found.temperature == 0.6
    assert {request.at for request in found.requests} == {0.0}
    assert len(workload("--workload", "nano", "--num-requests", "7", "--rate", "3").requests) == 7


class TestTrace:
    @pytest.fixture
    def path(self, tmp_path):
        lines = [
            {"timestamp": 5000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
            {"timestamp": 3000, "input_length": 1100, "output_length": 0, "hash_ids": [1, 3, 4]},
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        return str(path)

    def test_moments_and_lengths(self, path):
        late, early = reversed(workload("--trace", path, "--time-scale", "0.5").requests)
        assert (early.at, late.at) == (0.0, 1.0)
        assert (len(early.prompt.ids()), len(late.prompt.ids())) == (1100, 700)
        assert (early.num_out, late.num_out) == (1, 9)
        assert early.prompt.ids()[:512] == late.prompt.ids()[:512]
        assert early.prompt.ids()[:513] != late.prompt.ids()[:513]

    def test_cut_short(self, path):
        cut = workload("--trace", path, "--max-input-len", "600", "--max-output-len", "4")
        assert [len(request.prompt.ids()) for request in cut.requests] == [600, 600]
        assert [request.num_out for request in cut.requests] == [1, 4]
        assert len(workload("--trace", path, "--num-requests", "1").requests) == 1

    @pytest.mark.parametrize(
        ("line", "sentence"),
        [
            ("{}", "line 1 of .* has no list `hash_ids`"),
            ('{"hash_ids": [1], "output_length": 3}', "line 1 of .* no number `input_length`"),
            (
                '{"hash_ids": [], "input_length": 5, "output_length": true, "timestamp": 0}',
                "no number `output_length`",
            ),
            (
                '{"hash_ids": [], "input_length": 5, "output_length": 5, "timestamp": -1}',
                "no number `timestamp` from 0",
            ),
            (
                '{"hash_ids": [], "input_length": 5, "output_length": 5, "timestamp": Infinity}',
                "no number `timestamp` from 0",
            ),
            ("", "has no requests"),
        ],
    )
    def test_a_bad_file_is_one_sentence(self, tmp_path, line, sentence):
        path = tmp_path / "bad.jsonl"
        path.write_text(line)
        with pytest.raises(ConfigError, match=sentence):
            workload("--trace", str(path))
