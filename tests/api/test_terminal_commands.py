"""`quire generate` and `quire chat` as people use them: in a terminal, and at the end of a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from quire.api import cli

COMMAND = [sys.executable, "-m", "quire"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> list[str]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path)
    flags = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    return [str(folder), *flags, "--num-blocks", "512"]


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], input=text, capture_output=True, text=True, timeout=120
    )


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen([*COMMAND, *words], **streams)
        os.close(slave)

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.text, re.DOTALL):
            self.text += os.read(self._master, 65_536).decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_pipe_is_a_prompt(model: list[str]) -> None:
    flags = ["--max-tokens", "2", "--temperature", "0", "--json"]
    done = piped("The harbour\n", "generate", *model, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "The harbour"  # as if it had been typed


def run_here(
    text: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, *words: str
) -> tuple[str, str]:
    """In this process, which has torch already: what was written to both streams."""
    patch.setattr("sys.stdin", io.StringIO(text))
    status = cli.main(words)
    out, err = capsys.readouterr()
    assert status == 0, err
    return out, err


def test_a_dash_is_the_pipe_among_others(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--prompt", "One", "--prompt", "-", "--max-tokens", "1", "--json"]
    out, _ = run_here("Two\nlines\n", capsys, monkeypatch, "generate", *model, *flags)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["One", "Two\nlines"]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_pipe_is_told_of_prompt(text: str) -> None:
    done = piped(text, "generate")
    assert done.returncode == 2
    assert "give --prompt TEXT or --prompt-file FILE, or pipe a text" in done.stderr


def test_a_terminal_is_told_what_is_loaded_and_gets_the_text_as_it_grows(model: list[str]) -> None:
    """Words of an answer are there while it has thousands of tokens to go."""
    flags = ["--prompt", "The harbour", "--max-tokens", "8000", "--ignore-eos"]
    with Terminal("generate", *model, *flags) as terminal:
        terminal.read_until(r"ready in [^\n]*\n.*\w+ ")
        assert terminal.process.poll() is None
    assert terminal.text.startswith(f"Loading {model[0]}: its shape, with random weights\r\n")
    assert "  loading weights: 4 MiB in float32 on cpu\r\n" in terminal.text


def test_token_ids_of_a_model_without_words(
    tmp_path: Path,
    model: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_bytes((Path(model[0]) / "config.json").read_bytes())
    words = ["generate", str(tmp_path), *model[1:], "--prompt-ids", "1,2,3", "--max-tokens", "3"]
    out, _ = run_here("", capsys, monkeypatch, *words, "--ignore-eos")
    title, answer = out.split("\n", 1)
    assert "3 token ids" in title and len(json.loads(answer)) == 3


def test_chat_helps(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "/help\n/hepl\n/frobnicate it\n/reset\n/exit\nnever said\n"
    out, err = run_here(said, capsys, monkeypatch, "chat", *model)
    assert out == ""
    for command in ("/help", "/reset", "/exit"):
        assert f"\n{command} " in f"\n{err}"
    assert "There is no command /hepl; did you mean /help?" in err
    assert "There is no command /frobnicate; there are /help, /reset, /exit" in err
    assert "the conversation is forgotten" in err


def test_a_path_is_something_to_talk_about(
    model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--max-tokens", "2", "--ignore-eos"]
    _, err = run_here("/etc/hosts is a file\n", capsys, monkeypatch, "chat", *model, *flags)
    assert "no command" not in err and "[2 tokens" in err
