"""`quire bench serve` against a small server that streams with known delays."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from openai_server import Manners, OpenAIServer
from patience import PATIENCE_S, eventually

from quire.api import cli


@pytest.fixture
def server():
    with OpenAIServer() as server:
        yield server


class Bench:
    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, server, *flags, status=0):
        line = ["bench", "serve", "--url", server.url, "--processes", "1", *flags, "--json"]
        found = cli.main(line)
        out, err = self.capsys.readouterr()
        assert found == status, err
        return json.loads(out), err

    def refusal(self, *flags):
        status = cli.main(["bench", "serve", *flags])
        out, err = self.capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err


@pytest.fixture
def bench(capsys):
    return Bench(capsys)


SMALL = ("--rate", "200", "--num-requests", "12", "--input-len", "20", "--output-len", "4-8")


def row(result, name):
    [found] = [row for row in result["rows"] if row["ms"] == name]
    return found


class TestLoad:
    @pytest.mark.parametrize("api", ["completions", "chat"])
    def test_what_is_measured_is_what_the_server_did(self, bench, server, api):
        result, err = bench(server, *SMALL, "--api", api, "--slo-ttft", "60000")
        bodies = server.bodies[1:]  # after the first try
        assert len(bodies) == 12 and {body["model"] for body in bodies} == {"tiny"}
        asked = sum(body["max_tokens"] for body in bodies)
        assert result["tokens"] == {"in": 120, "cached": 48, "out": asked}
        assert result["requests"]["answered"] == 12 and result["requests"]["errors"] == {}
        # The server waits at least so long; how much longer is the machine's affair. A busy client
        # reads the first token late, so what lies between the first and the last has no such bound.
        assert row(result, "first token")["p50"] >= 20
        end = row(result, "end to end")
        assert end["p50"] >= 20 + 3 * 4
        assert 0 < row(result, "mean per token")["max"] <= (end["max"] - 20) / 3
        assert result["goodput"]["share"] == 1.0
        assert "12 of 12 requests answered" in err and "output tok/s" in err

    def test_prompts_of_each_form(self, bench, server):
        bench(server, *SMALL)
        bench(server, *SMALL, "--prompts", "ids")
        bench(server, *SMALL, "--api", "chat")
        texts, ids, chats = (server.bodies[first : first + 12] for first in (1, 14, 27))
        assert {len(body["prompt"].split()) for body in texts} == {20}
        assert {len(body["prompt"]) for body in ids} == {20}
        messages = [message for body in chats for message in body["messages"]]
        assert {message["role"] for message in messages} == {"user"}
        # They may overtake one another on their way.
        asked = sorted(body["prompt"] for body in texts)
        assert sorted(message["content"] for message in messages) == asked
        assert all("ignore_eos" not in body and body["temperature"] == 0 for body in texts)

    def test_answers_have_ids_where_prompts_have_and_the_server_can(self, bench, server):
        bench(server, *SMALL, "--prompts", "ids")
        assert all(body["return_token_ids"] is True for body in server.bodies)
        server.bodies.clear()
        server.manners = Manners(unknown="return_token_ids")
        result, _ = bench(server, *SMALL, "--prompts", "ids")
        assert result["requests"]["answered"] == 12
        assert ["return_token_ids" in body for body in server.bodies] == [True] + 13 * [False]

    def test_nano(self, bench, server):
        server.manners = Manners(first=0, between=0, at_once=64)
        result, _ = bench(server, "--workload", "nano", "--num-requests", "6")
        assert result["requests"]["short"] == 0
        body = server.bodies[-1]
        assert body["ignore_eos"] and body["temperature"] == 0.6 and len(body["prompt"]) >= 100

    def test_a_trace(self, bench, server, tmp_path):
        record = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps(record | {"timestamp": at}) for at in (0, 400, 800)))
        result, _ = bench(server, "--trace", str(path), "--time-scale", "0.25")
        assert result["seconds"] >= 0.2 and result["tokens"]["out"] == 9
        assert len({body["prompt"] for body in server.bodies[1:]}) == 1

    def test_the_load_is_open(self, bench, server):
        """All are sent while the first is not answered yet."""
        server.manners = Manners(together=1 + 12)  # after the first try
        result, _ = bench(server, *SMALL)
        assert result["requests"]["answered"] == 12 and result["requests"]["errors"] == {}

    def test_a_server_that_sends_several_tokens_at_once_and_no_usage(self, bench, server):
        server.manners = Manners(at_once=3, usage=False, newline="\r\n")
        result, _ = bench(server, *SMALL)
        assert result["tokens"]["out"] == sum(body["max_tokens"] for body in server.bodies[1:])

    def test_several_processes_lose_nothing(self, bench, server):
        result, _ = bench(server, *SMALL, "--processes", "2")
        assert result["client"]["processes"] == 2
        assert result["requests"]["answered"] == 12 == len(server.bodies) - 1
        assert len({body["prompt"] for body in server.bodies}) == 13

    def test_a_key(self, bench, server, monkeypatch):
        server.manners = Manners(api_key="open sesame")
        assert "give the right --api-key" in bench.refusal("--url", server.url)
        result, err = bench(server, *SMALL, "--api-key", "open sesame")
        monkeypatch.setenv("QUIRE_API_KEY", "open sesame")
        bench(server, *SMALL)
        assert "sesame" not in json.dumps(result) + err


class TestFailures:
    def test_each_is_counted_by_its_kind_and_none_is_lost(self, bench, server):
        fates = ["busy", "plain", "drop", "error", "cut", "hang", "busy"]
        server.manners.fails = {number + 2: fate for number, fate in enumerate(fates)}
        result, err = bench(server, *SMALL, "--timeout", "4")
        assert result["requests"]["errors"] == {
            "HTTP 503": 2,
            "no stream": 1,
            "disconnected": 1,
            "error in the stream": 1,
            "cut short": 1,
            "timeout": 1,
        }
        assert (result["requests"]["answered"], result["requests"]["failed"]) == (5, 7)
        assert "failed: 2 × HTTP 503: Try later." in err and "Out of luck." in err

    def test_nothing_answered_is_a_failure(self, bench, server):
        server.manners.fails = dict.fromkeys(range(1, 13), "busy")
        result, _ = bench(server, *SMALL, status=1)
        assert result["requests"]["errors"] == {"HTTP 503": 12} and result["rows"] == []

    @pytest.mark.parametrize("processes", ["1", "2"])
    def test_ctrl_c_shows_what_there_is(self, server, processes):
        """As from a terminal, which tells every process."""
        server.manners.fails = dict.fromkeys(range(4, 200), "hang")
        flags = ["--rate", "50", "--num-requests", "150", "--processes", processes, "--json"]
        running = subprocess.Popen(
            [sys.executable, "-m", "quire", "bench", "serve", "--url", server.url, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        eventually(lambda: len(server.bodies) >= 20)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 130, err
        assert "Traceback" not in err
        requests = json.loads(out)["requests"]
        assert requests["sent"] == 150 == requests["answered"] + requests["failed"]
        assert requests["errors"] == {"interrupted": requests["failed"]}


class TestRefusals:
    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            ("--url http://127.0.0.1:1", "no connection: .*; start the server"),
            ("--url http://127.0.0.1:1 --model x", "no connection: .*; start the server"),
            ("--url 127.0.0.1:8000", "takes an address such as http://127.0.0.1:8000"),
            ("--url http://host:port", "takes an address such as"),
            ("--rate 0", "takes requests a second above 0, or inf, not '0'"),
            ("--rate fast", "takes requests a second above 0, or inf, not 'fast'"),
            ("--slo-ttft inf", "takes milliseconds above 0, not 'inf'"),
            ("--num-requests 0", "takes a whole number from 1, not '0'"),
            ("--input-len 9-3", "or a range such as 100-1024, not '9-3'"),
            ("--workload nanno", "did you mean nano?"),
            ("--workload nano --api chat", "nano has prompts of token ids"),
            ("--workload nano --input-len 5", "--input-len is for --workload random"),
            ("--api chat --prompts ids", "--api chat takes no token ids"),
            ("--time-scale 2", "--time-scale is for --trace FILE"),
            ("--trace x --rate 3", "--rate has no effect with --trace"),
            ("--trace nowhere.jsonl", "nowhere.jsonl cannot be read"),
            ("--temperature -1", "--temperature takes a number from 0"),
            ("--plot x.gif", "must end in one of .png, .svg, .pdf"),
            ("--plot no/where.png", "in a folder that does not exist"),
            ("--json no/where.json", "in a folder that does not exist"),
            ("--block-size 4", "no flag --block-size"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, bench, flags, sentence):
        assert re.search(sentence.replace("?", r"\?"), bench.refusal(*flags.split()))

    def test_without_its_client_it_says_what_to_install(self, bench, monkeypatch):
        monkeypatch.setitem(sys.modules, "aiohttp", None)  # as where it is not installed
        assert "pip install aiohttp" in bench.refusal("--url", "http://127.0.0.1:1")

    def test_a_first_request_that_fails_says_why(self, bench, server):
        server.manners.fails = {0: "busy"}
        assert "HTTP 503: Try later" in bench.refusal("--url", server.url)

    def test_without_matplotlib(self, bench, monkeypatch):
        monkeypatch.setattr("quire.bench.report.picture.find_spec", lambda name: None)
        assert "pip install 'quire[plot]'" in bench.refusal("--plot", "x.png")

    def test_no_secret_of_the_address_is_shown(self, bench):
        sentence = bench.refusal("--url", "http://me:secret@127.0.0.1:1", "--model", "x")
        assert "secret" not in sentence


def test_a_picture_of_the_latencies(bench, server, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "latency.png"
    bench(server, *SMALL, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_help_has_examples_that_parse(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--help"])
    text = capsys.readouterr().out
    examples = [line for line in text.splitlines() if line.startswith("  quire bench serve")]
    assert len(examples) >= 3
    for line in examples:
        assert cli.make_parser().parse_args(shlex.split(line)[1:]).benchmark == "serve"
