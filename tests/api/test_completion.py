"""Completion scripts in the shells they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE_S

BASH = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_quire; printf '%s\\n' "${COMPREPLY[@]}" """

# zsh completes only in a terminal: what the script asks it for is written down instead.
ZSH = """
compdef() { : }; compset() { PREFIX=${PREFIX#*=} }
_describe() { for each in ${(P)@[-1]}; do print -r -- "${each%%:*}"; done }
compadd() { print -rl -- "${(P@)2}" }
_files() { print -rl -- *(N) }
source "$1"; shift
words=("$@"); CURRENT=$#; PREFIX=$words[-1]
_quire | while read -r line; do [[ $line == $PREFIX* || $PREFIX == *=* ]] && print -r -- $line; done
true
"""

Completer = Callable[..., list[str]]


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Completer:
    """What a shell offers for the last of some words, in a folder with one file."""
    shell = request.param
    if shutil.which(shell) is None:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{shell} is not installed (scripts/install_test_servers.sh does it)")
    folder = tmp_path_factory.mktemp(shell)
    (folder / "keys.txt").touch()
    script = folder.parent / f"quire.{shell}"
    command = [sys.executable, "-m", "quire", "completion", shell]
    script.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    subprocess.run([shell, "-n", script], check=True, timeout=PATIENCE_S)

    def offered(*words: str) -> list[str]:
        done = subprocess.run(
            _call(shell, script, ["quire", *words]),
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return [line.split("\t")[0] for line in done.stdout.splitlines() if line]

    return offered


def _call(shell: str, script: Path, words: list[str]) -> list[str]:
    if shell == "fish":
        line = " ".join(words)
        return ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    body = BASH if shell == "bash" else ZSH
    first = ["bash", "--norc"] if shell == "bash" else ["zsh", "-f"]
    return [*first, "-c", body, shell, str(script), *words]


def test_commands(complete: Completer) -> None:
    assert complete("ser") == ["serve"]
    assert set(complete("")) >= {"serve", "generate", "chat", "bench", "completion"}
    assert complete("bench", "lat") == ["latency"]
    assert set(complete("cache", "")) >= {"stat", "verify", "clear", "pin", "delete"}
    assert set(complete("completion", "")) == {"bash", "zsh", "fish"}


def test_flags_are_those_of_the_command(complete: Completer) -> None:
    assert complete("serve", "--max-num-s") == ["--max-num-seqs"]
    assert complete("serve", "some-model", "--port", "80", "--max-num-s") == ["--max-num-seqs"]
    assert complete("info", "--j") == ["--json"]
    assert complete("info", "--max-num-s") == []
    assert complete("bench", "serve", "--ur") == ["--url"]
    assert set(complete("serve", "--no-pa")) == {"--no-page"}


def test_values(complete: Completer) -> None:
    assert set(complete("generate", "--device", "")) == {"auto", "cpu", "cuda"}
    assert complete("bench", "latency", "--workload", "pre") == ["prefill"]
    assert complete("serve", "--api-keys-file", "ke") == ["keys.txt"]
    assert "keys.txt" not in complete("serve", "--port", "")
    assert set(complete("chat", "")) == {"smollm2", "keys.txt"}


def test_a_value_behind_an_equals_sign(complete: Completer, request: pytest.FixtureRequest) -> None:
    apart = "bash" in request.node.name  # which has = among its word breaks
    words = ["--device", "=", "cu"] if apart else ["--device=cu"]
    found = complete("generate", *words)
    assert [each.removeprefix("--device=") for each in found if "cuda" in each] == ["cuda"]


def test_every_command_and_flag_is_there(complete: Completer) -> None:
    from quire.api.cli import make_parser
    from quire.api.cli.shells.commands import commands

    for command in list(commands(make_parser()))[::5]:
        wanted = {flag.name for flag in command.flags}
        assert set(complete(*command.path.split(), "--")) == wanted
