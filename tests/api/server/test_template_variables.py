"""`chat_template_kwargs`: any name may be a variable but those that have their own place."""

from __future__ import annotations

import pytest

from quire import LLM, RequestError
from quire.models.text.chat_template import RESERVED

TALK = [{"role": "user", "content": "Hi"}]
# Names of parameters on the way to the template, which must not be taken for them.
ORDINARY = ["cls", "template", "variables", "value", "values", "tokenizer", "kwargs", "context", ""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", [*RESERVED, "tools"])
def test_reserved_names_are_refused_by_name(quick, path, name):
    body = {"messages": TALK, "chat_template_kwargs": {name: 1}}
    with quick.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert repr(name) in error["message"] and error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ORDINARY)
def test_all_others_are_variables(quick, path, name):
    body = {"messages": TALK, "chat_template_kwargs": {name: 1}}
    if path != "/tokenize":
        body["max_tokens"] = 1
    with quick.http() as http:
        assert http.post(path, json=body).status_code == 200


def test_tools_are_tokenized_as_a_chat_shows_them(quick):
    clock = {"type": "function", "function": {"name": "clock"}}
    with quick.http() as http:
        plain = http.post("/tokenize", json={"messages": TALK}).json()
        shown = http.post("/tokenize", json={"messages": TALK, "tools": [clock]}).json()
        body = {"messages": TALK, "tools": [clock], "max_tokens": 1}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert plain["count"] < shown["count"] == usage["prompt_tokens"]


def test_the_same_from_python(tiny):
    with LLM(tiny, load_format="dummy", dtype="float32", device="cpu", num_blocks=64) as llm:
        for name in RESERVED:
            with pytest.raises(RequestError, match=f"may not set '{name}'"):
                llm.chat(TALK, chat_template_kwargs={name: 1})
        for name in ORDINARY:
            llm._chat_prompt(TALK, {name: 1})
