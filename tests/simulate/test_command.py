"""`quire simulate`: a table, JSON, a picture; mistakes are one sentence."""

from __future__ import annotations

import json

import pytest
from simulated import talks

from quire.api.cli import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "talks.jsonl"
    with path.open("w") as file:
        for each in talks(num_talks=3, num_turns=2).arrivals:
            record = {
                "timestamp": 1000 * each.at,
                "input_length": each.num_in,
                "output_length": each.num_out,
                "hash_ids": each.blocks.tolist(),
            }
            file.write(json.dumps(record) + "\n")
    return str(path)


def simulate(*args):
    return main(["simulate", *args])


def test_a_row_for_each_way(trace, capsys):
    assert simulate("--trace", trace, "--replicas", "2") == 0
    shown = capsys.readouterr().out
    for row in ("random", "prefix", "prefix+host/lru", "prefix+host+ssd+remote"):
        assert f"\n{row} " in shown
    assert "6 requests" in shown and "2 × qwen3-8b on h200" in shown


def test_json_has_every_figure(trace, capsys):
    rows = "random,prefix+host"
    assert simulate("--trace", trace, "--rows", rows, "--copies", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["row"] for each in found["results"]] == rows.split(",")
    for each in found["results"]:
        assert each["requests"] == 12 and len(each["first_token"]) == 101
        assert each["first_token"] == sorted(each["first_token"])


def test_a_picture(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "fleet.png"
    assert simulate("--trace", trace, "--rows", "prefix", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_rates(trace, tmp_path, capsys):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"step": 1.0, "overlap": False}))
    found = []
    for more in ([], ["--rates", str(rates)]):
        assert simulate("--trace", trace, "--rows", "random", "--json", *more) == 0
        found.append(json.loads(capsys.readouterr().out)["results"][0])
    assert found[1]["first_token"][0] >= 1 > found[0]["first_token"][0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--rows", "prefx"], "did you mean prefix?"),
        (["--rows", ","], "--rows is empty"),
        (["--rates", "/no/such.json"], "cannot be read"),
        (["--speed", "0"], "a number above 0"),
        (["--block-size", "100"], "a part of 512"),
        (["--host-cache-bytes", "lots"], "such as 64GiB"),
        (["--gpu", "h201"], "did you mean h200?"),
        (["--plot", "x.txt"], "must end in"),
        (["--model", "qwen3-8x"], "qwen3-8x"),
        (["--num-blocks", "1", "--block-size", "16"], "longer than the pool"),
    ],
)
def test_mistakes_are_one_sentence(trace, capsys, args, says):
    assert simulate("--trace", trace, *args) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert says in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is no JSON object"),
        ('{"wieghts": 1}', "did you mean weights?"),
        ('{"matrix": 0}', "give a number above 0"),
        ('{"matrix": "fast"}', "is a number"),
        ('{"curve": 3}', "pairs of numbers"),
        ('{"curve": [[1, 1, 1]]}', "pairs of numbers"),
        ('{"curve": [[2, 1.0], [1, 1.0]]}', "rising"),
        ('{"curve": [[1, 0]]}', "above 0"),
    ],
)
def test_rates_that_cannot_be(trace, tmp_path, capsys, text, says):
    path = tmp_path / "rates.json"
    path.write_text(text)
    assert simulate("--trace", trace, "--rates", str(path)) == 2
    assert says in capsys.readouterr().err
