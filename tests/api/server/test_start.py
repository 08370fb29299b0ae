"""What a server answers while its model loads: its engine is held still for as long as we look."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from patience import PATIENCE_S, eventually
from server_process import ServerProcess


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def starting(model: str, *flags: str) -> Iterator[ServerProcess]:
    """A server whose engine has been stopped before it could load anything."""
    server = ServerProcess.tiny(model, *flags, port=free_port())
    try:
        engine = eventually(lambda: server.engine_pid, despite=(ValueError,))
        os.kill(engine, signal.SIGSTOP)
        with server.http() as http:
            eventually(lambda: http.get("/health"), despite=(httpx.TransportError,))
        yield server
    finally:
        if server.process.poll() is None:
            os.kill(server.engine_pid, signal.SIGCONT)
        server.stop()


def test_alive_but_not_ready_until_the_model_is_there(tiny):
    """What it loads is said at once, into a pipe; openai's client asks again after each 503."""
    with starting(tiny) as server, server.http() as http:
        said = server.log.splitlines()
        assert said[0] == f"Loading {tiny}: its shape, with random weights"
        assert said[1].startswith(f"  listening on {server.url}; starting the engine")
        assert len(said) == 2
        for prefix in ("", "/v1"):
            assert http.get(f"{prefix}/health").json() == {"status": "starting"}
            ready = http.get(f"{prefix}/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "the model is loading"})
            assert http.get(f"{prefix}/version").status_code == 200
        for path in ("/", "/v1/models", "/metrics", "/no/such/address"):
            early = http.get(path)
            assert (early.status_code, early.headers["retry-after"]) == (503, "2")
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "loading" in page.text and 'http-equiv="refresh"' in page.text
        with server.openai() as client:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="still loading") as caught:
                    client.completions.create(model="tiny", prompt="Hi", stream=stream)
                assert caught.value.code == "starting"
        big = http.post("/v1/completions", content=b"x" * (9 << 20))
        assert big.status_code == 413
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=30) as client:
            os.kill(server.engine_pid, signal.SIGCONT)
            answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
        assert answer.usage.completion_tokens == 2
        server.wait_until_ready()
        assert http.get("/ready").json() == {"status": "ready"}  # on the same connection
        assert http.get("/health").json() == {"status": "ok"}
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
    check_that_its_stages_were_said_as_they_came(server.log, tiny)


def check_that_its_stages_were_said_as_they_came(log: str, tiny: str) -> None:
    stages = [f"  opening {tiny}\n", "  loading weights: 4 MiB in float32 on cpu"]
    stages += ["sizing the pool", "loading the tokenizer"]
    stages += [f"{tiny} in float32 on cpu", "Quire serves tiny"]
    places = [log.index(stage) for stage in stages]
    assert places == sorted(places)
    assert [log.count(stage) for stage in stages] == [1] * len(stages)


def test_an_engine_that_dies_on_the_way_ends_the_server_with_a_sentence(tiny):
    with starting(tiny) as server, server.http() as http:
        http.get("/ready")  # its connection stays open
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == 2
        *before, last = server.log.splitlines()
        assert last.startswith("error: The engine's process has ended")
        assert len(before) == 2 and "Traceback" not in server.log


def test_a_model_that_cannot_be_loaded_does_too(tiny):
    with starting(tiny, "--load-format", "auto") as server:
        os.kill(server.engine_pid, signal.SIGCONT)
        assert server.wait() == 2
        [line] = [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert "safetensors" in line and "Traceback" not in server.log


def test_of_two_on_one_port_the_second_does_not_start_and_a_signal_ends_the_first_at_once(tiny):
    """Though it is not ready yet."""
    with starting(tiny) as server:
        engine = server.engine_pid
        port = server.url.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-m", "quire", "serve", "no-such-model", "--port", port],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 2
        assert "Cannot listen" in done.stderr
        server.terminate()
        assert server.wait() == 0
        assert len(server.log.splitlines()) == 2  # what it had begun, and no complaint
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
