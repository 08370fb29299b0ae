"""Keys, tenants, and how much the server takes on."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest
from patience import PATIENCE_S, eventually

from quire.api.server.errors import ApiError
from quire.api.server.keys import Keys
from quire.errors import ConfigError

PROMPT = [*range(100, 164)]


def ask(server, key: str, **options):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, **options}
    return server.openai(key).completions.create(**body)


def cached(server, key: str, **options) -> int:
    return ask(server, key, **options).usage.prompt_tokens_details.cached_tokens


def test_without_a_key_only_health_can_be_seen(strict):
    with strict.http() as http:
        for path in ("/health", "/ready", "/version"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "sk-one"}):
            for response in (
                http.get("/v1/models", headers=headers),
                http.post("/v1/completions", json={"prompt": "hi"}, headers=headers),
                http.post("/tokenize", json={"prompt": "hi"}, headers=headers),
            ):
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        ask(strict, "sk-wrong")


def test_tenants_share_nothing_unless_they_are_one_group(strict):
    assert cached(strict, "sk-one") == 0
    assert cached(strict, "sk-one") > 0
    assert cached(strict, "sk-two") == 0
    assert cached(strict, "sk-three") == 0
    assert cached(strict, "sk-four") > 0  # of the same family
    salt = {"extra_body": {"cache_salt": "inner"}}
    assert cached(strict, "sk-one", **salt) == 0
    assert cached(strict, "sk-one", **salt) > 0
    assert cached(strict, "sk-two", **salt) == 0


def test_a_request_cannot_take_another_tenants_salt(strict):
    """Not even by naming, as its own salt, what the other's is derived to."""
    other = Keys([("sk-one", None)]).tenant("Bearer sk-one").salt
    assert cached(strict, "sk-one") > 0
    assert cached(strict, "sk-two", extra_body={"cache_salt": other}) == 0


def test_keys_from_a_file_and_from_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# who may come in\nsk-a\nsk-b team  # two words\n\n")
    monkeypatch.setenv("QUIRE_API_KEYS", "sk-c, sk-d team")
    keys = Keys.read(str(file))
    tenants = {name: keys.tenant(f"Bearer sk-{name}") for name in "abcd"}
    assert tenants["b"] == tenants["d"]
    assert len({tenant.salt for tenant in tenants.values()}) == 3
    assert "sk-a" not in tenants["a"].salt + tenants["a"].name
    monkeypatch.delenv("QUIRE_API_KEYS")
    with pytest.raises(ApiError):
        Keys.read(str(file)).tenant("Bearer sk-c")
    assert not Keys.read(None)
    assert Keys.read(None).tenant(None).namespace("mine") == "mine"


def test_a_file_that_is_no_key_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read(str(tmp_path / "missing"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no API key"):
        Keys.read(str(tmp_path / "empty"))
    (tmp_path / "prose").write_text("these are no keys\n")
    with pytest.raises(ConfigError, match="at most one group"):
        Keys.read(str(tmp_path / "prose"))


def test_browsers_may_call_from_the_allowed_origin_alone(strict, http):
    asks = {"Access-Control-Request-Method": "POST"}
    with strict.http() as cautious:
        for origin, allowed in [("https://app.example", True), ("https://evil.example", False)]:
            headers = {"Origin": origin, **asks}
            response = cautious.options("/v1/completions", headers=headers)
            assert ("access-control-allow-origin" in response.headers) == allowed
    response = http.options("/v1/completions", headers={"Origin": "https://app.example", **asks})
    assert "access-control-allow-origin" not in response.headers


def test_a_body_above_the_limit_is_refused(strict):
    headers = {"Authorization": "Bearer sk-one", "Content-Type": "application/json"}
    with strict.http(headers=headers) as http:
        small = http.post("/tokenize", content=b'{"prompt": "' + b"x " * 40_000 + b'"}')
        assert small.status_code == 200
        large = http.post("/tokenize", content=b'{"prompt": "' + b"x" * 200_000 + b'"}')
        assert large.status_code == 413
        assert large.json()["error"]["type"] == "invalid_request_error"

        def unannounced():
            for _ in range(20):
                yield b"x" * 10_000

        assert http.post("/tokenize", content=unannounced()).status_code == 413


def test_a_full_queue_is_a_429_that_says_when_to_come_back(strict, anthropic):
    """One runs and two wait; the fourth is sent away, and so is one with too many tokens."""
    client = strict.openai("sk-one")
    running = client.completions.create(
        model="tiny", prompt="go", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    done: list[int] = []

    def wait_in_line() -> None:
        done.append(ask(strict, "sk-two", prompt=[1] * 20).usage.completion_tokens)

    def refused(**options) -> openai.RateLimitError:
        with pytest.raises(openai.RateLimitError) as caught:
            ask(strict, "sk-one", **options)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        return caught.value

    threads = [threading.Thread(target=wait_in_line) for _ in range(2)]
    threads[0].start()
    eventually(lambda: num_waiting(strict) == 1)
    assert "tokens are waiting" in str(refused(prompt=[1] * 190))
    threads[1].start()
    eventually(lambda: num_waiting(strict) == 2)
    assert "requests are waiting" in str(refused())
    assert "requests are waiting" in str(refused(stream=True))
    with pytest.raises(anthropic.OverloadedError, match="requests are waiting") as caught:
        strict.anthropic("sk-one").messages.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": "Hi"}]
        )
    assert int(caught.value.response.headers["retry-after"]) >= 1
    running.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert done == [1, 1]


def num_waiting(server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    [line] = [each for each in lines if each.startswith("vllm:num_requests_waiting{")]
    return float(line.split()[-1])


def test_the_server_listens_on_loopback_unless_told_otherwise(server):
    assert httpx.URL(server.url).host == "127.0.0.1"
