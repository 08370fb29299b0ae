"""Whatever a client sends is answered at once, at worst by a 4xx, and harms no other request."""

from __future__ import annotations

import json
import math

import pytest
from bystander import bystander
from effort import effort

HUGE_INT, BEYOND_INT32 = 10**400, 2**31
NUMBERS = [0, -1, math.nan, math.inf, -math.inf, BEYOND_INT32, HUGE_INT, "7", None, True, [], {}]
MANY, MOST = effort(10**5, 10**6), 10**6
JSON = {"Content-Type": "application/json"}

NUMERIC = [
    "n", "best_of", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "prompt_logprobs",
    "priority", "length_penalty",
]  # fmt: skip
LISTS = {
    "prompt": [[], [[]], [None], [""], [-1], [BEYOND_INT32], [HUGE_INT], [0.5], [1] * MOST,
               ["a"] * MOST, [[1]] * MANY, [None] * MANY, ["a", [1]], {}, 7, None, True, "\ud800",
               "x" * MANY, [[1, None]], [True], "\x00"],
    "stop": [[], [""], [None], ["a"] * MANY, [None] * MANY, "", "x" * MANY, {}, 7, ["\ud800"]],
    "stop_token_ids": [[], [-1], [None], [BEYOND_INT32], [1] * MANY, ["a"] * MANY, {}, 7, "1"],
    "logit_bias": [{}, {"a": 1}, {"-1": 1}, {"1": None}, {"1": "x"}, {"1": math.nan}, {"1": 101},
                   {str(BEYOND_INT32): 1}, {"²": 1}, {str(i): 0 for i in range(MANY // 10)}, [], 7],
    "stream_options": [[], 7, {"include_usage": 3}],
    "user": [7, {}],
    "use_beam_search": [7, "yes", True],
    "early_stopping": [7, "always", True],
    "cache_salt": [7, "x" * 300, "\ud800"],
    "model": [7, "no such", "\ud800", "x" * MANY],
    "echo": [7, "yes"],
}  # fmt: skip
CHAT = {
    "messages": [[], None, 7, [7], [{}], [{"role": 7, "content": "x"}], [{"role": "user"}] * MANY,
                 [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": [7]}],
                 [{"role": "user", "content": {"a": 1}}], [7] * MANY],
    "chat_template_kwargs": [{"messages": []}, {"add_generation_prompt": 3}, {"tools": 7}, [], 7],
    "top_logprobs": [-1, 21, BEYOND_INT32, "3", math.nan],
    "max_completion_tokens": [0, -1, HUGE_INT, math.inf],
    "tools": [[{}], 7, [7] * 200, [{"type": "function", "function": {"name": "a b"}}]],
    "tool_choice": ["any", 7, "required", {"type": "function"}, {"function": {"name": 7}}],
    "response_format": [{"type": "json_object"}, 7, {}, {"type": []}, {"type": "json_schema"},
                        {"type": "json_schema", "json_schema": {"schema": {"type": "word"}}}],
}  # fmt: skip
FORMS = {
    "guided_regex": ["(a", "", 7, "a" * 20_000, "((a{0,100}){0,100}){0,100}", "(" * 9000,
                     ".*a.{18}b", "\x04", "\ud800"],
    "guided_choice": [[], [""], "ab", [7] * MANY, ["a"] * MANY, ["x" * 2000], {}],
    "guided_json": [7, "{", [], {"type": 7}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"},
                    '{"items":' * 50_000, {"enum": ["x" * 200_000]}, {"allOf": [{"$ref": "#"}]}],
    "guided_grammar": ["", "start: nothing", "root ::= nothing", "start: " + "(" * 20_000,
                       "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(200)),
                       'start: x\nx: x x | "a" | "aa"'],
    "structured_outputs": [{}, {"regx": "a"}, {"regex": 7}, {"json": {}, "regex": "a"}, 7],
    "structured": [{"json_object": False}, {"choice": None}],
}  # fmt: skip


def post(http, path: str, body: object):
    content = json.dumps(body)  # with NaN and Infinity, as sloppy clients write them
    return http.post(path, content=content, headers=JSON)


def check(response, what: str) -> None:
    assert response.status_code in (200, 400, 404, 413), (what, response.status_code, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, what


def test_every_field_with_every_bad_value(quick):
    base = {"prompt": "hi", "max_tokens": 2}
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    before = quick.peak_memory
    with quick.http() as http, bystander(quick):
        for name in NUMERIC:
            for value in NUMBERS:
                check(post(http, "/v1/completions", {**base, name: value}), f"{name}={value}")
        for name, values in LISTS.items():
            for value in values:
                what = f"{name}={str(value)[:40]}"
                check(post(http, "/v1/completions", {**base, name: value}), what)
        for name, values in CHAT.items():
            for value in values:
                body = {**talk, name: value}
                if name == "top_logprobs":
                    body["logprobs"] = True
                if name == "max_completion_tokens":
                    del body["max_tokens"]
                check(post(http, "/v1/chat/completions", body), f"{name}={str(value)[:40]}")
        for name, values in FORMS.items():
            for value in values:
                what = f"{name}={str(value)[:40]}"
                check(post(http, "/v1/completions", {**base, name: value}), what)
        check(
            post(http, "/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 0}), "echo"
        )
    assert quick.peak_memory - before < 600 * 1024**2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
     b'{"prompt": "hi", "n": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_requests(quick, content):
    with quick.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = http.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].endswith(".") and error["message"] != "."


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "yaml"}),
    ],
)
def test_an_error_is_a_sentence_and_names_the_field(quick, field, value):
    with quick.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], field: value}
        response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].endswith(".")


def test_another_content_type_is_told_what_is_right(quick):
    with quick.http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "hi"}')
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/no/such/page").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n": 129}, "n must be"),
        ({"best_of": 129}, "best_of must be"),
        ({"logprobs": 21}, "logprobs must be"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be"),
        ({"stop": ["x"] * 65}, "stop must be"),
        ({"stop": "x" * 1025}, "stop must be"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must be"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must be"),
        ({"prompt": ["x"] * 257}, "at most 256"),
        ({"prompt": ["x"] * 256, "n": 5}, "more than 1,024"),
        ({"cache_salt": "x" * 257}, "at most 256 characters"),
    ],
)
def test_caps_are_a_400_that_names_them(quick, body, says):
    with quick.http() as http:
        response = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **body})
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


def test_unknown_fields_are_ignored_and_logged_once(quick):
    with quick.http() as http:
        for _ in range(2):
            body = {"prompt": "hi", "max_tokens": 1, "made_up_field": 1, "metadata": {"a": "b"}}
            assert http.post("/v1/completions", json=body).status_code == 200
    assert quick.log.count("made_up_field") == 1
