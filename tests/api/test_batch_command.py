"""`quire batch`: every line of a file has one result, however often the command is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_files import BAD_LINES, ids_in, request, results_in, write_requests
from effort import effort
from patience import PATIENCE_S, eventually
from tiny_model import write_tiny_model

COUNT, KILLS = effort(400, 10_000), effort(1, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> list[str]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path)
    flags = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    return [str(folder), "--served-model-name", "tiny", *flags, "--num-blocks", "512"]


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quire", "batch", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def run(*words: str | Path) -> tuple[int, str]:
    process = start(*words)
    _, said = process.communicate(timeout=PATIENCE_S * 5)
    return process.returncode, said


@pytest.mark.long
def test_killed_again_and_again_every_line_has_one_result(model: list[str], tmp_path: Path):
    requests = write_requests(tmp_path / "in.jsonl", COUNT)
    results = tmp_path / "out.jsonl"
    for kill in range(1, KILLS + 1):
        process = start(requests, results, *model)
        enough = kill * COUNT // (KILLS + 2)
        eventually(lambda: len(ids_in(results)) >= enough)  # noqa: B023
        process.kill()
        process.communicate()
        assert len(ids_in(results)) < COUNT
    with results.open("ab") as file:
        file.write(b'{"id": "batch_req_0123456789abcdef_9", "custom_id": "torn')
    status, said = run(requests, results, *model)
    assert status == 0, said
    assert f"{COUNT:,} of {COUNT:,} lines have a result." in said
    assert sorted(ids_in(results)) == sorted(f"line-{i}" for i in range(COUNT))
    assert all(each["response"]["status_code"] == 200 for each in results_in(results))


def test_bad_lines_have_error_results_and_an_interrupt_ends_in_order(
    model: list[str], tmp_path: Path
):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = '{"custom_id": "chat", "url": "/v1/chat/completions", "body": {"max_tokens": 2, '
    chat += '"messages": [{"role": "user", "content": "Hi"}]}}'
    message = chat.replace('"chat"', '"message"').replace("chat/completions", "messages")
    endless = request("endless", "Once", max_tokens=8000)
    good = request("good", "a", model="tiny")
    requests.write_text("\n".join([*BAD_LINES, good, chat, message, endless]))
    process = start(requests, results, *model)
    eventually(lambda: len(ids_in(results)) == len(BAD_LINES) + 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "13 of 14 lines have a result, 10 of them with an error." in said
    by_id = {each["custom_id"]: each for each in results_in(results)}
    for name in ("good", "chat"):
        assert by_id[name]["response"]["body"]["usage"]["completion_tokens"] == 2
        assert by_id[name]["error"] is None
    assert by_id["message"]["response"]["body"]["usage"]["output_tokens"] == 2
    assert by_id["bad-url"]["error"]["code"] == "invalid_url"
    assert by_id["bad-stream"]["error"]["code"] == "invalid_body"
    assert by_id["bad-prompt"]["response"]["status_code"] == 400
    assert by_id["bad-model"]["response"]["body"]["error"]["code"] == "model_not_found"


def test_an_interrupt_while_the_model_is_loaded_is_no_error(model: list[str], tmp_path: Path):
    """A terminal sends it to the engine's process, too."""
    requests = write_requests(tmp_path / "in.jsonl", 2)
    process = start(requests, tmp_path / "out.jsonl", *model)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: children.read_text())
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "Traceback" not in said and "error" not in said, said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.jsonl", "out.jsonl"], "There is no file nothing.jsonl"),
        (["in.jsonl", "in.jsonl"], "would overwrite the requests"),
        (["in.jsonl", "no/such/folder/out.jsonl"], "cannot be written"),
        (["in.jsonl", "locked.jsonl"], "Another run writes into"),
        (["in.jsonl"], "RESULTS"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_the_model_is_loaded(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    import fcntl

    from quire.api import cli

    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(request("a", "b"))
    with Path("locked.jsonl").open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert cli.main(["batch", *words]) == 2
    assert says in capsys.readouterr().err
    assert Path("in.jsonl").read_text() == request("a", "b")
