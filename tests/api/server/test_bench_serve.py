"""`quire bench serve` on a real server: tokens are counted right, and its cache finds a trace's."""

from __future__ import annotations

import json

import pytest
from server_process import ServerProcess

from quire.api import cli


def bench(capsys: pytest.CaptureFixture[str], server: ServerProcess, *flags: str) -> dict:
    line = ["bench", "serve", "--url", server.url, "--processes", "1", *flags, "--json"]
    status = cli.main(line)
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize("form", [["--prompts", "ids"], ["--prompts", "text"], ["--api", "chat"]])
def test_answers_of_full_length(capsys, quick, form) -> None:
    sizes = ["--rate", "inf", "--num-requests", "3", "--input-len", "20", "--output-len", "5"]
    result = bench(capsys, quick, *sizes, "--ignore-eos", *form)
    assert result["model"] == "tiny" and result["requests"]["errors"] == {}
    assert result["tokens"]["out"] == 15 and result["requests"]["short"] == 0
    if form == ["--prompts", "ids"]:
        assert result["tokens"]["in"] == 60
    assert [row["ms"] for row in result["rows"]][:2] == ["first token", "between tokens"]


def test_a_trace_s_blocks_are_found_again(capsys, quick, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    record = {"input_length": 530, "output_length": 2, "hash_ids": ["same", "own"]}
    path.write_text("\n".join(json.dumps(record | {"timestamp": at}) for at in (0, 1)))
    result = bench(capsys, quick, "--trace", str(path))
    assert result["tokens"]["cached"] >= 500
