"""Key comparison by time; the prefix cache as an oracle by time or counters.

CVE-2025-59425, CVE-2025-46570.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import re

import pytest
from patience import eventually

from quire.api.server import keys as keys_module
from quire.api.server.errors import ApiError
from quire.api.server.keys import Keys

KNOWN = ["sk-one", "sk-two", "sk-three"]


@pytest.mark.parametrize("given", [*KNOWN, "sk-on", "sk-onf", "", "x" * 10_000, "sk-one\x00"])
def test_every_key_is_compared_in_constant_time(monkeypatch, given):
    """All of them, whichever is right, and by digests, so that no length shows either."""
    compared = []

    def watched(a, b):
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    class Watched:
        compare_digest = staticmethod(watched)

    monkeypatch.setattr(keys_module, "hmac", Watched)
    keys = Keys([(key, None) for key in KNOWN])
    if given in KNOWN:
        assert keys.tenant(f"Bearer {given}").salt
    else:
        with pytest.raises(ApiError) as refused:
            keys.tenant(f"Bearer {given}")
        assert refused.value.status == 401
    if given:
        digests = [hashlib.sha256(key.encode()).digest() for key in KNOWN]
        assert [sorted(pair) for pair in compared] == [
            sorted((known, hashlib.sha256(given.strip().encode()).digest())) for known in digests
        ]


PROMPT_TOKENS = 'vllm:prompt_tokens_total{engine="0",model_name="tiny"}'


def ask(server, key, prompt):
    client = server.openai(key)
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    return answer.usage.prompt_tokens_details.cached_tokens


def counters(server) -> dict[str, float]:
    """Counts of events, without those of seconds, which differ from request to request."""
    with server.http(headers={"Authorization": "Bearer sk-two"}) as http:
        lines = http.get("/metrics").text.splitlines()
    found = (re.fullmatch(r"(\w[\w:]*(?:\{.*\})?) (\S+)", line) for line in lines)
    named = {each[1]: float(each[2]) for each in found if each}
    return {name: value for name, value in named.items() if "second" not in name.lower()}


def counters_with(server, num_tokens) -> dict[str, float]:
    """The counters, once they have so many tokens of prompts: they may be a moment old."""
    found: dict[str, float] = {}

    def has_all() -> bool:
        found.update(counters(server))
        return found[PROMPT_TOKENS] >= num_tokens

    eventually(has_all)
    return found


def change(server, prompt) -> dict[str, float]:
    """What one request of the second tenant's moves; all others are in the counters already."""
    before = counters(server)
    assert ask(server, "sk-two", prompt) == 0
    after = counters_with(server, before[PROMPT_TOKENS] + len(prompt))
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    # How many are free, cached or touched depends on where blocks lie, not on whose they are.
    gauges = ("block", "rate", "mem", "fragment", "usage", "refcount", "latency", "running")
    return {k: v for k, v in moved.items() if v and not any(word in k for word in gauges)}


def test_what_another_tenant_has_asked_shows_in_no_counter(keyed_server):
    dice = random.Random(5)
    secret, other = ([dice.randrange(100, 16_000) for _ in range(96)] for _ in range(2))
    start = counters(keyed_server).get(PROMPT_TOKENS, 0)
    assert ask(keyed_server, "sk-one", secret) == 0
    assert ask(keyed_server, "sk-one", secret) > 0  # the cache works
    counters_with(keyed_server, start + 2 * 96)
    change(keyed_server, [dice.randrange(100, 16_000) for _ in range(96)])  # names appear once
    assert change(keyed_server, secret) == change(keyed_server, other)
