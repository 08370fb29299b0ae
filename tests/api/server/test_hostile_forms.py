"""Forms that would take minutes and gigabytes to compile, on a server that others use."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

PRIMES = [99999989, 99999971, 99999959, 99999941, 99999931, 99999847]
PATIENCE_S = 120.0
LEAVES = httpx.Timeout(PATIENCE_S, read=0.3)


def hostile(i: int) -> dict:
    schema = {"type": "integer", "multipleOf": PRIMES[i]}
    return {"prompt": "Hi", "max_tokens": 8, "guided_json": schema}


def key(name: str) -> dict:
    return {"Authorization": f"Bearer sk-{name}"}


@pytest.fixture(scope="module")
def keyed(tiny, tmp_path_factory):
    """Two tenants. The last test here ends it."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("sk-greedy\nsk-patient\n")
    server = ServerProcess.tiny(tiny, "--api-keys-file", str(keys))
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def forks(server: ServerProcess) -> list[int]:
    """The forms that are being tried."""
    return [fork for sandbox in children(server.engine_pid) for fork in children(sandbox)]


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def test_those_who_leave_hold_nobody_up(keyed):
    plain = {"prompt": "Hi", "max_tokens": 8, "guided_regex": "ab{2}c"}
    with keyed.http(headers=key("patient")) as http:
        assert http.post("/v1/completions", json=plain).json()["choices"][0]["text"] == "abbc"
        before = peak_bytes(keyed.engine_pid)
        for i in range(len(PRIMES)):
            with (
                keyed.http(headers=key("greedy")) as greedy,
                pytest.raises(httpx.ReadTimeout),
            ):
                greedy.post("/v1/completions", json=hostile(i), timeout=LEAVES)
        answer = http.post("/v1/completions", json={**plain, "guided_regex": "xy{3}"})
        assert answer.json()["choices"][0]["text"] == "xyyy"
        until(lambda: not forks(keyed))
        assert peak_bytes(keyed.engine_pid) - before < 64 << 20


def test_a_client_that_stays_is_told_why(keyed):
    with keyed.http(headers=key("greedy")) as http:
        answer = http.post("/v1/completions", json=hostile(0))
    assert answer.status_code == 400
    says = r"The json_schema cannot be used \(it takes more than .* to compile\); change it\."
    assert re.fullmatch(says, answer.json()["error"]["message"])


def test_a_server_stops_in_the_middle_of_compiling(keyed):
    answers: list[int] = []

    def ask(i: int) -> None:
        with keyed.http(headers=key("greedy")) as http:
            answers.append(http.post("/v1/completions", json=hostile(i)).status_code)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PRIMES))]
    for thread in threads:
        thread.start()
    until(lambda: forks(keyed))
    begun = [*children(keyed.engine_pid), *forks(keyed)]
    keyed.terminate()
    assert keyed.wait() == 0, keyed.log
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(answers) == len(PRIMES) and set(answers) <= {400, 503}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun))
