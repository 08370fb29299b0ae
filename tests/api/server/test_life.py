"""How a server begins and ends: signals, the death of either process, settings that are wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import openai
import pytest
from patience import PATIENCE_S, eventually
from server_process import ServerProcess

from quire.kv.tiers.ssd.inspector import stat

LONG = {"model": "tiny", "prompt": "Go on", "max_tokens": 8000}
EXTRA = {"extra_body": {"ignore_eos": True}}


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def follow(server: ServerProcess, parts: list, **options) -> threading.Thread:
    """A stream in a thread: its texts and finish reasons land in `parts`, or the error does."""

    def run() -> None:
        try:
            with server.openai() as client:
                stream = client.completions.create(**{**LONG, **options}, stream=True, **EXTRA)
                for part in stream:
                    parts.append(part.choices[0].finish_reason)
        except openai.APIError as error:
            parts.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_sigterm_under_load(tiny, tmp_path):
    """Not ready any more, open streams end as they should, and the cache is on disk."""
    cache = ["--ssd-cache-dir", str(tmp_path), "--ssd-cache-bytes", "64MB"]
    server = ServerProcess.tiny(tiny, *cache)
    engine = server.engine_pid
    streams: list[list] = [[] for _ in range(4)]
    threads = [follow(server, parts, max_tokens=400) for parts in streams]
    eventually(lambda: all(streams))
    with server.http() as http, server.http() as other:
        assert http.get("/ready").status_code == 200
        assert other.get("/ready").status_code == 200
        server.terminate()
        eventually(lambda: http.get("/ready").status_code == 503)
        assert other.get("/health").status_code == 200
        refused = other.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [parts[-1] for parts in streams] == ["length"] * 4
    assert server.wait() == 0, server.log
    assert not is_running(engine)
    kept = stat(tmp_path)
    assert kept.blocks > 20  # each stream has filled 25
    assert (kept.torn, kept.is_in_use) == (0, False)


def test_waiting_and_draining_have_an_end_and_clients_are_told(tiny):
    patience = ["--drain-seconds", "0.5", "--max-queue-seconds", "0.3", "--max-num-seqs", "1"]
    server = ServerProcess.tiny(tiny, *patience)
    parts: list = []
    thread = follow(server, parts)
    eventually(lambda: parts)
    for stream in (False, True):  # the one place is taken
        with pytest.raises(openai.RateLimitError, match="for its turn") as caught:
            server.openai().completions.create(**LONG, stream=stream)
        assert "retry-after" in caught.value.response.headers
    server.terminate()
    thread.join(PATIENCE_S)
    assert isinstance(parts[-1], openai.APIError)
    assert "shut down" in str(parts[-1])
    assert server.wait() == 0, server.log


def test_the_engine_is_killed(tiny):
    server = ServerProcess.tiny(tiny)
    parts: list = []
    thread = follow(server, parts)
    eventually(lambda: parts)
    os.kill(server.engine_pid, signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert isinstance(parts[-1], openai.APIError)
    assert "engine's process has ended" in str(parts[-1])
    assert server.wait() == 1
    assert server.log.splitlines()[-1].startswith("error: The engine's process has ended")
    assert "Traceback" not in server.log


def test_the_server_is_killed(tiny):
    server = ServerProcess.tiny(tiny)
    engine = server.engine_pid
    parts: list = []
    thread = follow(server, parts)
    eventually(lambda: parts)
    server.process.kill()
    eventually(lambda: not is_running(engine))
    thread.join(PATIENCE_S)


def serve(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "--port must be a whole number"),
        (["--prot", "80"], "did you mean --port"),
        (["no-such-model", "--port", "0"], "There is no model"),
        (["--api-keys-file", "/no/such/file"], "cannot be read"),
        (["--host", "256.0.0.1"], "Cannot listen"),
        (["--max-queued-requests", "0"], "--max-queued-requests must be"),
    ],
)
def test_a_mistake_is_one_sentence(flags, says):
    done = serve(*flags)
    assert done.returncode == 2
    *before, line = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert all(each.startswith(("Loading ", "  ")) for each in before)


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve("no-such-model", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Cannot listen" in done.stderr
