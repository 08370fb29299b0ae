"""`/v1/cache/…` of a real server: a tenant lists, pins and deletes its own, in every tier."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

from quire.api import cli

PROMPT = list(range(100, 200))
FULL = len(PROMPT) // 16


@pytest.fixture(scope="module")
def server(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "archive").mkdir()
    tiers = ["--host-cache-bytes", "8MiB", "--ssd-cache-dir", str(folder / "ssd")]
    tiers += ["--ssd-cache-bytes", "8MiB", "--remote-cache-url", f"file://{folder}/archive"]
    keys = {"QUIRE_API_KEYS": "sk-one,sk-two,sk-boss operator"}
    server = ServerProcess.tiny(tiny, "--num-blocks", "64", "--block-size", "16", *tiers, env=keys)
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


def caller(server: ServerProcess, key: str) -> httpx.Client:
    return server.http(headers={"Authorization": f"Bearer {key}"})


def blocks(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["blocks"]
    return found


def ask(http: httpx.Client, salt: str = "") -> int:
    """How many tokens of the prompt were cached."""
    body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_controls_its_own_and_no_other(server: ServerProcess) -> None:
    with caller(server, "sk-one") as one, caller(server, "sk-two") as two:
        assert ask(one) == 0 and ask(one, "chat-7") == 0 and ask(two) == 0
        assert ask(one) == 96
        everything = dict.fromkeys(["device", "host", "ssd", "remote"], 2 * FULL)
        pinned = blocks(one.post("/v1/cache/pin", json={"tokens": PROMPT, "seconds": 60}))
        assert pinned == {"device": None, "host": FULL, "ssd": FULL, "remote": FULL}
        assert blocks(one.get("/v1/cache")) == everything
        with caller(server, "sk-boss") as boss:
            assert blocks(boss.get("/v1/cache"))["host"] == 3 * FULL
        gone = blocks(one.post("/v1/cache/delete", json={"tokens": PROMPT[:20]}))
        assert gone == dict.fromkeys(everything, FULL)
        assert blocks(one.get("/v1/cache")) == dict.fromkeys(everything, FULL)
        assert ask(one, "chat-7") == 96 and ask(one) == 0 and ask(two) == 96
        gone = blocks(one.post("/v1/cache/delete", json={"everything": True}))
        assert gone["device"] == gone["host"] == gone["ssd"] == gone["remote"] == 2 * FULL
        assert blocks(one.get("/v1/cache")) == dict.fromkeys(everything, 0)
        assert ask(two) == 96 and ask(one, "chat-7") == 0


def test_the_command_line_does_the_same(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*words: str) -> dict[str, Any]:
        assert cli.main(["cache", *words, "--url", server.url, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    monkeypatch.setenv("QUIRE_API_KEY", "sk-two")
    with caller(server, "sk-two") as two:
        ask(two)
    ids = [str(token) for token in PROMPT]
    assert told("pin", "--seconds", "60", "--tokens", *ids)["host"] == FULL
    assert told("list")["host"] == FULL
    assert told("delete", "--tokens", *ids)["host"] == FULL
    assert told("list") == dict.fromkeys(["device", "host", "ssd", "remote"], 0)
    assert cli.main(["cache", "delete", "--everything", "--url", server.url]) == 0
    assert "host     0 blocks" in capsys.readouterr().out
    assert cli.main(["cache", "pin", "--seconds", "1", "--url", server.url]) == 2
    assert "--prompt or by --tokens" in capsys.readouterr().err
    assert cli.main(["cache", "list", "--url", "http://127.0.0.1:1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["cache", "list", "--url", server.url, "--api-key", "sk-no"]) == 2
    assert "not known here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"-ERR unknown command\r\n\r\n", "does not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "does not answer"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\n{}", "answered 500"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "is no server of Quire"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "is no server of Quire"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"blocks":7}', "is no server of Quire"),
    ],
)
def test_what_is_no_server_of_quire_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], answer: bytes, says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert cli.main(["cache", "list", "--url", url]) == 2
        thread.join()
    assert says in capsys.readouterr().err
    assert cli.main(["cache", "list", "--url", "http://127.0.0.1:80 00"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("pin", {"tokens": PROMPT}, "seconds"),
        ("pin", {"tokens": PROMPT, "seconds": 0}, "seconds"),
        ("pin", {"seconds": 5}, "one of prompt, messages and tokens"),
        ("delete", {}, "one of prompt, messages and tokens"),
        ("delete", {"tokens": []}, "token ids"),
        ("delete", {"tokens": "x"}, "token ids"),
        ("delete", {"prompt": ""}, "token ids"),
        ("delete", {"prompt": "word " * 2_000}, "A prefix is a list of"),
        (
            "pin",
            {"messages": [{"role": "user", "content": "word " * 2_000}], "seconds": 5},
            "A prefix is a list of",
        ),
        ("delete", {"tokens": [10**9]}, "outside the model"),
        ("delete", {"prompt": "x", "everything": True}, "either a prefix or everything"),
    ],
)
def test_a_bad_request_is_a_400(
    server: ServerProcess, path: str, body: dict[str, Any], says: str
) -> None:
    with caller(server, "sk-one") as http:
        response = http.post(f"/v1/cache/{path}", json=body)
    assert response.status_code == 400 and says in response.text


def test_a_key_is_needed(server: ServerProcess, quick: ServerProcess) -> None:
    with server.http() as http:
        assert http.get("/v1/cache").status_code == 401
        assert http.post("/v1/cache/delete", json={"everything": True}).status_code == 401
    with quick.http() as http:  # a server without keys
        response = http.post("/v1/cache/delete", json={"everything": True})
        assert response.status_code == 403 and "--api-keys-file" in response.text
