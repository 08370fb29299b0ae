"""`quire bench replicas` on real processes, small enough for a test."""

import json

import pytest
from tiny_model import write_tiny_model

from quire.api.cli import main

SIZES = {"replicas": 2, "conversations": 4, "turns": 3, "groups": 2, "concurrency": 2}


def test_conversations_stay_with_their_replica_and_compute_only_what_is_new(
    tmp_path, smollm2_path, capsys
):
    model = str(write_tiny_model(tmp_path / "tiny", smollm2_path))
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += ["--routing", "prefix", "--load-format", "dummy", "--dtype", "float32"]
    flags += ["--device", "cpu", "--num-blocks", "256", "--json", str(tmp_path / "figures.json")]
    assert main(["bench", "replicas", model, *flags]) == 0
    [row] = json.loads((tmp_path / "figures.json").read_text())["rows"]
    first = 96 + 48  # a system prompt and a question; then each turn adds an answer and a question
    assert row["prompt tokens"] == 4 * (first + (first + 56) + (first + 112))
    assert row["moves"] == 0
    assert row["computed"] + row["device"] == row["prompt tokens"]
    assert row["computed"] <= 4 * first + 8 * (56 + 16)  # what is new, and the rest of a block
    assert "4 conversations of 3 turns over 2 replicas" in capsys.readouterr().out


@pytest.mark.parametrize("names", ["", "prefix,nearest"])
def test_a_way_that_is_not_there_is_refused(names, capsys):
    assert main(["bench", "replicas", "--routing", names]) == 2
    assert "There is no routing" in capsys.readouterr().err
