"""What a tenant can see does not depend on what another tenant has asked.

Two servers are used alike, but for one thing: on the first, another tenant has asked the very
prompt that the probe asks; on the second, one of the same shape. All that the probing tenant can
read, and all that its requests change, must be equal: answers, headers, metrics, the page's data.
Times differ between any two runs and are left out.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from patience import eventually
from server_process import ServerProcess

SECRET = random.Random(1).choices(range(100, 9000), k=200)
OTHER = random.Random(2).choices(range(100, 9000), k=200)
NUM_BLOCKS = 64
# By name: times, and what is counted once in so many seconds.
TIMES = re.compile(r"seconds\w*_(sum|bucket)|tier_seconds|alloc_rate|kv_gather_latency|speed_up")
TIMES_ON_THE_PAGE = {"now", "at", "arrived", "first_tokens", "seconds", "created", "id", "name"}
HEADERS_OF_THEIR_OWN = {"date", "request-id", "x-request-id"}
DEADLINE_S = 60.0
FRESH_S = 0.3  # an answer of the engine's is used again for a shorter time


@pytest.fixture(scope="module")
def servers(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    def start(number: int) -> ServerProcess:
        disk = tmp_path_factory.mktemp(f"disk-{number}")
        tiers = [
            "--host-cache-bytes",
            "4MiB",
            "--ssd-cache-dir",
            str(disk),
            "--ssd-cache-bytes",
            "4MiB",
        ]
        keys = {"QUIRE_API_KEYS": "sk-other,sk-probe"}
        return ServerProcess.tiny(tiny, "--num-blocks", str(NUM_BLOCKS), *tiers, env=keys)

    with ThreadPoolExecutor() as threads:
        pair = list(threads.map(start, range(2)))
    yield pair
    for server in pair:
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log, server.log


def as_tenant(server: ServerProcess, name: str) -> httpx.Client:
    return server.http(headers={"Authorization": f"Bearer sk-{name}"})


def metrics(http: httpx.Client) -> dict[str, str]:
    pairs = re.findall(r"^([^#\s]\S+|[^#\s]\S*\{.*\}) (\S+)$", http.get("/metrics").text, re.M)
    return {name: value for name, value in pairs if not TIMES.search(name)}


def without_times(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {name: each for name, each in data.items() if name not in TIMES_ON_THE_PAGE}
        return {name: without_times(each) for name, each in kept.items()}
    return [without_times(each) for each in data] if isinstance(data, list) else data


def page(http: httpx.Client) -> dict[str, Any]:
    paths = ["live", "blocks", "journal", "replicas", *(f"blocks/{i}" for i in range(NUM_BLOCKS))]
    return {path: without_times(http.get(f"/page/data/{path}").json()) for path in paths}


def seen(http: httpx.Client) -> dict[str, Any]:
    """All that is open to the tenant, once nothing moves any more."""
    deadline, before = time.monotonic() + DEADLINE_S, None
    while (now := metrics(http)) != before and time.monotonic() < deadline:
        before = now
        time.sleep(FRESH_S)
    return {"metrics": now, "page": page(http)}


def nothing_is_copied(http: httpx.Client) -> bool:
    """Whether the tiers have all that was computed; until then these blocks are in use."""
    time.sleep(FRESH_S)
    return not http.get("/page/data/live").json()["blocks"]["in_use"]


def answer(response: httpx.Response) -> tuple[int, dict[str, str], Any]:
    headers = {k: v for k, v in response.headers.items() if k not in HEADERS_OF_THEIR_OWN}
    return response.status_code, headers, without_times(response.json())


def probe(server: ServerProcess, asked_before: list[int]) -> dict[str, Any]:
    """Ask the secret prompt, whole and in part, when another tenant has asked `asked_before`."""
    one = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    with as_tenant(server, "other") as other:
        body = {"prompt": asked_before, **one}
        assert other.post("/v1/completions", json=body).status_code == 200
    told: dict[str, Any] = {}
    with as_tenant(server, "probe") as http:
        told["before"] = seen(http)
        for name, prompt, more in [
            ("half", SECRET[:96], {}),
            ("whole", SECRET, {}),
            ("again", SECRET, {}),
            ("differs", [*SECRET[:150], *OTHER[150:]], {}),
            ("samples", SECRET[:150], {"n": 2}),
            ("logprobs", SECRET, {"prompt_logprobs": 1}),
            ("bad", SECRET, {"top_p": 7}),
        ]:
            told[name] = answer(
                http.post("/v1/completions", json={"prompt": prompt, **one, **more})
            )
            eventually(lambda: nothing_is_copied(http))  # the next one's journal has that, too
        told["after"] = seen(http)
    return told


def test_another_tenants_prompt_changes_nothing_that_a_tenant_sees(servers):
    with ThreadPoolExecutor() as threads:
        asked, not_asked = threads.map(probe, servers, (SECRET, OTHER))
    for name in asked:
        assert asked[name] == not_asked[name], name
    cached = [asked[name][2]["usage"]["prompt_tokens_details"] for name in ("half", "again")]
    assert [each["cached_tokens"] for each in cached] == [0, 192]  # it does look at the cache
    before, after = asked["before"]["metrics"], asked["after"]["metrics"]
    changed = {name for name, value in after.items() if before.get(name) != value}
    assert len(changed) > 20, changed
    told = after['quire_misses_total{engine="0",model_name="tiny",reason="nothing cached"}']
    assert float(told) == 3  # the other tenant's, half of the prompt, and the rest of it


def test_the_log_names_no_reason_that_is_another_tenants(servers):
    for server in servers:
        reasons = set(re.findall(r'"missed":"([^"]*)"', server.log))
        assert reasons and not any("salt" in reason for reason in reasons), reasons
