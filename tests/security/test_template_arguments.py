"""Template arguments from a request that block the loop or call functions.

CVE-2025-62426, CVE-2025-61620.
"""

from __future__ import annotations

import pytest
from bystander import bystander

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ENDLESS = "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}"
RESERVED = ["self", "messages", "add_generation_prompt", "template", "environment", "context"]


@pytest.mark.parametrize("name", [*RESERVED, "chat_template", "tokenize", "tools", "__class__"])
def test_no_argument_takes_the_place_of_the_servers_own(tiny_server, name):
    with tiny_server.http() as http:
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {**TALK, "chat_template_kwargs": {name: ENDLESS}}
            if path == "/tokenize":
                del body["max_tokens"]
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            elif path == "/tokenize":
                plain = http.post(path, json={"messages": TALK["messages"]}).json()
                assert answer.json()["count"] == plain["count"]  # it was not rendered


def test_a_template_of_the_callers_is_never_run(tiny_server):
    with tiny_server.http() as http, bystander(tiny_server, max_tokens=20):
        answer = http.post("/v1/chat/completions", json={**TALK, "chat_template": ENDLESS})
        assert answer.status_code == 400
        nested = {"role": "user", "content": "{{ 7 * 191 }}{% include 'x' %}" + ENDLESS}
        answer = http.post("/tokenize", json={"messages": [nested]})
        ids = answer.json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert ENDLESS in text and "1337" not in text
