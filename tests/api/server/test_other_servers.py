"""Fields of other servers' APIs: understood, refused or harmless, and no constraint is ignored."""

from __future__ import annotations

import json
import logging
import re
from itertools import combinations
from pathlib import Path

import pytest

from quire.api.server.answers.response_format import STRUCTURED_FIELDS
from quire.api.server.errors import ApiError
from quire.api.server.schema.chat import ChatRequest
from quire.api.server.schema.completions import CompletionRequest
from quire.api.server.schema.messages import MessagesRequest
from quire.api.server.schema.other_apis import ELSEWHERE
from quire.api.server.schema.other_servers import HARMLESS, REFUSED
from quire.api.server.schema.responses import ResponsesRequest
from quire.api.server.schema.unknown_fields import MOST_NAMES, UnknownFieldLog
from quire.structured import StructuredOutput

DOCS = Path(__file__).parents[3] / "docs"
TALK = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "chat": lambda **more: ChatRequest(messages=TALK, **more),
    "completions": lambda **more: CompletionRequest(prompt="Hi", **more),
}
PATHS = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "Hi"},
}
both = pytest.mark.parametrize("route", ROUTES)


@both
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_an_answer_is_refused(route, name):
    for value in ("x", 7, {"a": 1}, ["x"]):
        with pytest.raises(ApiError) as caught:
            ROUTES[route](**{name: value}).refuse_unsupported()
        assert caught.value.status == 400 and caught.value.param == name
        assert str(caught.value).startswith(f"{name} is not supported by this server; ")


@both
def test_values_that_ask_for_nothing_may_be_sent(route):
    neutral = [(name, value) for name, field in REFUSED.items() for value in field.neutral]
    for name, value in [*neutral, *[(name, None) for name in REFUSED]]:
        ROUTES[route](**{name: value}).refuse_unsupported()


APIS = {
    **ROUTES,
    "responses": lambda **more: ResponsesRequest(**{"input": "Hi", **more}),
    "messages": lambda **more: MessagesRequest(**{"messages": TALK, "max_tokens": 2, **more}),
}
FIELDS = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


# They change no answer, wherever they are sent: notes, hints, and what matters only with a field
# that is refused.
HARMLESS_ELSEWHERE = frozenset(
    {
        *("cache_control", "context_management", "inference_geo", "max_tool_calls", "metadata"),
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "speed", "store", "stream_options", "user"),
        *("verbosity", "early_stopping", "length_penalty"),
    }
)


@pytest.mark.parametrize("api", APIS)
def test_what_another_api_has_is_refused_or_harmless(api):
    """No field that Quire has for some request is dropped in silence from another."""
    request = FIELDS[api]
    every = {name for each in FIELDS.values() for name in each.model_fields}
    mine = {*request.model_fields, *request.NOT_SUPPORTED, *REFUSED}
    assert every - mine <= {*ELSEWHERE, *HARMLESS_ELSEWHERE} and {*ELSEWHERE} <= every
    for name in (every & {*ELSEWHERE}) - mine:
        with pytest.raises(ApiError, match=f"{name} is not a field of this API; ") as caught:
            APIS[api](**{name: {"a": 7}}).refuse_unsupported()
        assert caught.value.param == name
        for neutral in (None, *ELSEWHERE[name].neutral):
            body = APIS[api](**{name: neutral})
            body.refuse_unsupported()
            assert name not in body.unknown_fields()


@both
def test_what_is_harmless_is_ignored_and_logged(route, caplog):
    unknown = UnknownFieldLog()
    with caplog.at_level(logging.WARNING, logger="quire.server"):
        for name in HARMLESS:
            body = ROUTES[route](**{name: 7})
            body.refuse_unsupported()
            unknown.note(body.unknown_fields())
    assert [name for name in HARMLESS if f"'{name}'" not in caplog.text] == []


def test_a_client_cannot_fill_the_log(caplog):
    unknown = UnknownFieldLog()
    with caplog.at_level(logging.WARNING, logger="quire.server"):
        for i in range(2 * MOST_NAMES):
            unknown.note([f"field {i}", f"field {i}", "a long name " * 1000])
    assert len(caplog.records) == MOST_NAMES
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_a_field_is_in_one_place():
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not known & {*REFUSED, *HARMLESS} and not {*REFUSED} & {*HARMLESS}
    assert {*STRUCTURED_FIELDS} <= known


def test_the_documentation_has_them_all():
    text = (DOCS / "serving.md").read_text() + (DOCS / "structured-output.md").read_text()
    names = [*REFUSED, *HARMLESS, *STRUCTURED_FIELDS]
    assert [name for name in names if f"`{name}" not in text] == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a" [0-9]'
BY_SCHEMA = StructuredOutput(json_schema=SCHEMA)
LENIENT = {**SCHEMA, "x-guidance": {"lenient": True, "coerce_one_of": True}}
UNDERSTOOD = [
    ("regex", "a+", StructuredOutput(regex="a+")),
    ("json_schema", SCHEMA, BY_SCHEMA),
    ("json_schema", json.dumps(SCHEMA), BY_SCHEMA),
    ("ebnf", GBNF, StructuredOutput(grammar=GBNF)),
    ("grammar", GBNF, StructuredOutput(grammar=GBNF)),
    ("grammar", {"type": "json", "value": SCHEMA}, BY_SCHEMA),
    ("grammar", {"type": "regex", "value": "a+"}, StructuredOutput(regex="a+")),
    ("guided_json", SCHEMA, BY_SCHEMA),
    ("guided_json_object", True, StructuredOutput(json_object=True)),
    ("guided_regex", "a+", StructuredOutput(regex="a+")),
    ("guided_choice", ["a", "b"], StructuredOutput(choice=["a", "b"])),
    ("guided_grammar", GBNF, StructuredOutput(grammar=GBNF)),
    ("structured_outputs", {"json": SCHEMA}, BY_SCHEMA),
    (
        "structured_outputs",
        {"regex": "a+", "json": None, "disable_any_whitespace": True, "disable_fallback": False},
        StructuredOutput(regex="a+"),
    ),
    ("structured", {"choice": ["a"]}, StructuredOutput(choice=["a"])),
    ("response_format", {"type": "json_object"}, StructuredOutput(json_object=True)),
    (
        "response_format",
        {"type": "json_object", "schema": SCHEMA},
        StructuredOutput(json_schema=LENIENT),
    ),
    (
        "response_format",
        {"type": "json_schema", "schema": SCHEMA, "strict": True},
        BY_SCHEMA,
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        BY_SCHEMA,
    ),
    ("response_format", {"type": "regex", "regex": "a+"}, StructuredOutput(regex="a+")),
    ("response_format", {"type": "regex", "pattern": "a+"}, StructuredOutput(regex="a+")),
    ("response_format", {"type": "grammar", "grammar": GBNF}, StructuredOutput(grammar=GBNF)),
    # What asks for nothing.
    ("response_format", {"type": "text"}, None),
    ("guided_json_object", False, None),
    ("regex", "", None),
    ("grammar", "", None),
    ("ebnf", "", None),
    ("json_schema", "", None),
]


@both
@pytest.mark.parametrize(("name", "value", "form"), UNDERSTOOD)
def test_forms_in_other_servers_words(route, name, value, form):
    request = ROUTES[route](**{name: value})
    request.refuse_unsupported()
    assert request.params().structured == form


BAD = [
    ("grammar", 7),
    ("grammar", {"type": "xml", "value": "x"}),
    ("grammar", {"type": "regex"}),
    ("json_schema", "{"),
    ("json_schema", 7),
    ("ebnf", "x" * 70_000),
    ("response_format", {"type": "structural_tag"}),
    ("response_format", {"type": "json_object", "schema": "{}"}),
    ("response_format", {"type": "regex"}),
    ("response_format", {"type": "grammar"}),
    ("structured_outputs", {"structural_tag": "x"}),
    ("structured_outputs", {"json": SCHEMA, "whitespace_pattern": " "}),
    ("structured_outputs", {"json": SCHEMA, "disable_additional_properties": True}),
]


@both
@pytest.mark.parametrize(("name", "value"), BAD)
def test_forms_that_are_not_understood_are_refused(route, name, value):
    with pytest.raises(ApiError) as caught:
        ROUTES[route](**{name: value}).params()
    assert caught.value.status == 400 and caught.value.param == name


@both
def test_two_forms_at_once_are_refused(route):
    asked = {name: value for name, value, form in reversed(UNDERSTOOD) if form is not None}
    assert asked.keys() == STRUCTURED_FIELDS.keys()
    for one, other in combinations(asked, 2):
        with pytest.raises(ApiError, match="Ask for one form of output, not for") as caught:
            ROUTES[route](**{one: asked[one], other: asked[other]}).params()
        assert one in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("regex", "ab{2}[0-9]{3}", "ab{2}[0-9]{3}"),
        ("json_schema", {"type": "integer", "minimum": 10, "maximum": 12}, "1[0-2]"),
        ("json_schema", '{"enum": ["x", "y"]}', '"[xy]"'),
        ("ebnf", 'root ::= "<" word{2} ">"\nword ::= [a-c]', "<[a-c]{2}>"),
        ("grammar", 'root ::= ("yes" | "no") # comment\n', "yes|no"),
        ("grammar", {"type": "regex", "value": "x[0-9]"}, "x[0-9]"),
        ("response_format", {"type": "json_object", "schema": {"const": {"a": 1}}}, r'\{"a": ?1\}'),
    ],
)
def test_the_answer_has_the_form(quick, path, name, value, pattern):
    with quick.http() as http:
        answer = http.post(path, json={**PATHS[path], "max_tokens": 40, name: value})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("path", PATHS)
def test_a_refused_field_is_a_400_that_says_what_to_use(quick, path):
    with quick.http() as http:
        answer = http.post(path, json={**PATHS[path], "max_tokens": 1, "stop_regex": "a+"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "stop_regex")
    assert error["code"] == "unsupported_parameter" and "; use stop." in error["message"]
