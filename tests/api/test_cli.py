"""The command line: help with examples that work, and one sentence instead of a traceback."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
from patience import PATIENCE_S

from quire.api import cli
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser, UsageError
from quire.api.cli.terminal import StopOnInterrupt, one_line
from quire.beam_params import BeamSearchParams
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.progress import human_bytes


def quire(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        timeout=PATIENCE_S,
    )


class TestHelp:
    @pytest.mark.parametrize("command", ["", *cli.COMMANDS])
    def test_has_examples(self, command: str) -> None:
        done = quire(*command.split(), "--help")
        assert done.returncode == 0
        assert "examples:\n  quire" in done.stdout

    def test_names_every_command_and_no_other(self) -> None:
        shown = re.findall(r"^    (\w+)(?:  |$)", quire("--help").stdout, re.MULTILINE)
        running = ["serve", "generate", "batch", "chat"]
        others = ["quantize", "cache", "info", "bench", "simulate", "completion"]
        assert shown == [*running, *others]

    def test_every_setting_is_a_flag_of_generate(self) -> None:
        text = quire("generate", "--help").stdout
        for settings in (EngineConfig, SamplingParams, BeamSearchParams):
            for setting in fields(settings):
                assert f"--{setting.name.replace('_', '-')}" in text

    def test_without_arguments_is_the_help(self) -> None:
        assert quire().stdout == quire("--help").stdout

    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_the_examples_are_command_lines_that_parse(self, command: str) -> None:
        examples = re.findall(
            rf"quire {command}.*", import_module(f"quire.api.cli.{command}").EXAMPLES
        )
        assert examples
        for line in examples:
            assert cli.make_parser().parse_args(shlex.split(line)[1:]).command == command

    def test_version(self) -> None:
        assert re.fullmatch(r"quire \d+\.\d+\.\d+\n", quire("--version").stdout)


MISTAKES = [
    ("generat", "did you mean generate?"),
    ("frobnicate", "not one of serve, generate, batch, chat, quantize, cache, info, bench"),
    ("generate", "give --prompt TEXT or --prompt-file FILE"),
    ("generate --prompt x --blok-size 8", "no flag --blok-size; did you mean --block-size?"),
    ("generate --prompt x --max-num-sequences 8", "no flag --max-num-sequences; did you mean"),
    ("generate --prompt x --block 8", "no flag --block"),
    ("generate --prompt x --block-size twelve", "--block-size: takes a whole number, not 'twelve'"),
    ("generate --prompt x --block-size 12", "error: --block-size must be a power of two"),
    ("generate --prompt x --block-size", "--block-size: expected one argument"),
    (
        "generate --prompt x --device gpu",
        "error: --device must be one of auto, cpu, cuda, not 'gpu'",
    ),
    ("generate --prompt x --temperature -1", "error: --temperature must be a number from 0"),
    ("generate --prompt x --temperature nan", "error: --temperature must be a number from 0"),
    ("generate --prompt x --temperature warm", "--temperature: takes a number, not 'warm'"),
    (
        "generate --prompt x --max-tokens 0",
        "error: --max-tokens must be at least 1; 0 needs --prompt-logprobs",
    ),
    ("generate --prompt x --logit-bias [1]", "--logit-bias: takes a JSON object"),
    ("generate --prompt x --logit-bias {1:", "--logit-bias: takes a JSON object"),
    ("generate --prompt-ids 1,x", "--prompt-ids: takes whole numbers with commas, not '1,x'"),
    ("generate --prompt x --logprobs 2", "only with --json"),
    ("generate --prompt x --ssd-cache-bytes 8GiB", "both --ssd-cache-dir and --ssd-cache-bytes;"),
    (
        "generate --prompt x --tensor-parallel-size 2",
        "error: --tensor-parallel-size 2 does not divide",
    ),
    (
        "generate --prompt x --device cpu --kv-cache-dtype fp8",
        "error: --kv-cache-dtype fp8 needs an NVIDIA",
    ),
    ("generate --prompt x --beam-width 0", "error: --beam-width must be a whole number"),
    ("generate --prompt x --beam-width 2 --top-k 5", "--top-k cannot be combined with --beam-wid"),
    ("generate --prompt x --length-penalty 2", "--length-penalty needs --beam-width"),
    (
        "generate --prompt x --beam-width 2 --early-stopping often",
        "error: --early-stopping must be True, False",
    ),
    ("generate --prompt-file /nowhere/at/all", "Cannot read the prompts in /nowhere/at/all"),
    ("generate --prompt x one two", "no place for 'two'; put text with spaces in quotes"),
    ("generate one --model two --prompt x", "Give the model once"),
    ("generate --prompt x --n 0", "error: --n must be a whole number"),
    ("generate --tp 2", "no flag --tp; did you mean --tensor-parallel-size?"),
    ("generate --max-new-tokens 8", "no flag --max-new-tokens; did you mean --max-tokens?"),
    ("chat --temp 2", "no flag --temp; did you mean --temperature?"),
    ("chat --n 2", "no flag --n"),
    ("serve --max-num-seqs 0", "error: --max-num-seqs must be a whole number from 1"),
    ("serve --port 70000", "error: --port must be a whole number from 0 to 65,535"),
    ("serve --host-cache-size 8GiB", "did you mean --host-cache-bytes?"),
    ("cache stat --jsn", "no flag --jsn; did you mean --json?"),
    ("bench serve --base-url http://x", "no flag --base-url; did you mean --url?"),
    ("bench serve --num-prompts 9", "no flag --num-prompts; did you mean --num-requests?"),
    ("bench attention --block-size 12", "error: --block-size must be a power of two"),
    ("simulate --num-request 9", "no flag --num-request; did you mean --num-requests?"),
    ("completion tcsh", "'tcsh' is not one of bash, zsh, fish"),
    ("bench", "required: BENCHMARK"),
    ("bench thruput", "did you mean throughput?"),
    ("info --jsn", "no flag --jsn; did you mean --json?"),
]


@pytest.mark.parametrize(("line", "sentence"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(
    line: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_mistake_shows_no_traceback_from_the_shell() -> None:
    done = quire("generate", "--prompt", "x", "--blok-size", "8")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_mistake_is_found_before_torch_is_loaded() -> None:
    code = (
        "import sys; from quire.api.cli import main;"
        "main(['generate', '--prompt', 'x', '--block-size', '12']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


class TestFailures:
    """`info` stands for any command; what it meets is injected."""

    def fail_with(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
        def run(args: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr("quire.api.cli.info.run", run)
        return cli.main(["info"])

    def test_bug(self, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delenv("QUIRE_DEBUG", raising=False)
        assert self.fail_with(ZeroDivisionError("by zero"), monkeypatch) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ZeroDivisionError (a bug in Quire; QUIRE_DEBUG=1")
        assert error.count("\n") == 1

    def test_debug_shows_the_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("QUIRE_DEBUG", "1")
        assert self.fail_with(ZeroDivisionError("by zero"), monkeypatch) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err

    def test_ctrl_c(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.fail_with(KeyboardInterrupt(), monkeypatch) == 130
        assert capsys.readouterr().err.strip() == ""

    def test_request_error(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.fail_with(RequestError("The prompt is empty."), monkeypatch) == 2
        assert capsys.readouterr().err == "error: The prompt is empty.\n"

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        code = (
            "import sys; from quire.api import cli; from quire.api.cli import info;"
            "info.run = lambda args: print('something'); sys.exit(cli.main(['info']))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE_S)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")


class TestFlags:
    def parse(self, *arguments: str) -> argparse.Namespace:
        parser = CommandParser(prog="test")
        add_flags(parser, SamplingParams, "sampling")
        add_flags(parser, EngineConfig, "engine settings")
        return parser.parse_args(arguments)

    def test_only_what_was_given_is_there(self) -> None:
        args = self.parse("--block-size", "32", "--temperature", "0")
        assert given(EngineConfig, args) == {"block_size": 32}
        assert given(SamplingParams, args) == {"temperature": 0.0}

    def test_values_arrive_with_their_types(self) -> None:
        args = self.parse(
            *("--stop", "a", "--stop", "b c", "--stop-token-ids", "7"),
            *("--logit-bias", '{"42": -1.5}', "--ignore-eos", "--no-enable-prefix-caching"),
        )
        params = SamplingParams(**given(SamplingParams, args))
        assert (tuple(params.stop), tuple(params.stop_token_ids)) == (("a", "b c"), (7,))
        assert (params.logit_bias, params.ignore_eos) == ({42: -1.5}, True)
        assert EngineConfig.create(**given(EngineConfig, args)).enable_prefix_caching is False

    def test_a_shared_name_is_one_flag_that_both_read(self) -> None:
        args = self.parse("--seed", "7")
        assert given(EngineConfig, args) == given(SamplingParams, args) == {"seed": 7}

    def test_flags_are_not_guessed_from_their_beginnings(self) -> None:
        with pytest.raises(UsageError, match="no flag --temp"):
            self.parse("--temp", "1")

    def test_own_defaults_are_shown_and_skipped_fields_are_not(self) -> None:
        parser = CommandParser(prog="test")
        add_flags(parser, SamplingParams, "sampling", skip=["n"], defaults={"max_tokens": 99})
        assert "(default: 99)" in " ".join(parser.format_help().split())
        assert "--n " not in parser.format_help()


class TestInfo:
    def test_json_has_machine_versions_and_choices(self) -> None:
        done = quire("info", "--json")
        assert done.returncode == 0, done.stderr
        info = json.loads(done.stdout)
        assert info["machine"]["cores"] >= 1
        assert info["machine"]["memory"] > info["machine"]["free_memory"] > 0
        assert info["versions"]["torch"]
        assert info["quire_would_use"]["device"] in ("cpu", "cuda")

    def test_it_says_without_torch_what_the_engine_chooses_with_it(self) -> None:
        import torch

        from quire.kernels.backend import backend_for
        from quire.runner.device import choose_device, choose_dtype

        code = (
            "import sys; from quire.api import cli; cli.main(['info', '--json']);"
            "print('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        answer, imported = done.stdout.splitlines()
        says, device = json.loads(answer), choose_device("auto")
        chosen = says["quire_would_use"]
        assert imported == "False"
        assert chosen["device"] == device.type
        assert chosen["dtype"] == str(choose_dtype("auto", None, device)).removeprefix("torch.")
        assert chosen["backend"] == backend_for(device).name
        assert len(says["machine"]["gpus"]) == torch.cuda.device_count()
        for number, told in enumerate(says["machine"]["gpus"]):
            gpu = torch.cuda.get_device_properties(number)
            assert told == f"{gpu.name}, {human_bytes(gpu.total_memory)}"

    def test_text_names_the_model_folder(self, tmp_path: Any) -> None:
        done = quire("info", QUIRE_CACHE=str(tmp_path))
        assert str(tmp_path) in done.stdout
        assert "GiB" in done.stdout


class TestTerminal:
    def test_the_first_interrupt_asks_and_the_second_insists(self) -> None:
        with pytest.raises(KeyboardInterrupt), StopOnInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            assert interrupt.asked
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_long_text_is_cut_to_one_line(self) -> None:
        assert one_line("a\n b\tc") == "a b c"
        assert one_line("x" * 100, 10) == "x" * 9 + "…"

    @pytest.mark.parametrize(
        ("count", "text"), [(0, "0 B"), (2048, "2 KiB"), (5 << 20, "5 MiB"), (6 << 30, "6.0 GiB")]
    )
    def test_human_bytes(self, count: int, text: str) -> None:
        assert human_bytes(count) == text
