"""Structured output and tools, by OpenAI's own client.

On the demo model, where the answer must make sense; what is enforced on any is tried on a tiny one.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from effort import effort
from jsonschema import Draft202012Validator

from quire.bench.engine.random_schemas import random_schema

BOB = [{"role": "user", "content": "Bob is 33 years old. Describe him as JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time of day"}}
ROME = [{"role": "user", "content": "What is the weather in Rome?"}]


def chat(client, messages=BOB, **options):
    options = {"model": "smollm2", "temperature": 0, "max_tokens": 60, **options}
    return client.chat.completions.create(messages=messages, **options)


@pytest.fixture(scope="module")
def tiny_client(quick):
    with quick.openai() as client:
        yield client


def tiny_chat(client, messages=BOB, **options):
    return chat(client, messages, model="tiny", **options)


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


# --- forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_json_schema(client, strict):
    answer = chat(client, response_format=json_schema(PERSON, strict=strict)).choices[0]
    assert json.loads(answer.message.content) == {"name": "Bob", "age": 33}
    assert answer.finish_reason == "stop"


def test_a_json_schema_as_a_stream(client):
    parts = chat(client, response_format=json_schema(PERSON), stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert json.loads(text) == {"name": "Bob", "age": 33}


def test_the_clients_own_helper_for_types(client):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str
        age: int

    answer = client.beta.chat.completions.parse(
        model="smollm2", messages=BOB, temperature=0, max_tokens=60, response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=33)


def test_a_json_object_and_plain_text(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=12).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)
    text = chat(client, response_format={"type": "text"}, max_tokens=4).choices[0].message.content
    assert not text.startswith("{")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_regex": "[A-Z][a-z]{2,5}, [0-9]{2}"}, "[A-Z][a-z]{2,5}, [0-9]{2}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"guided_json": PERSON}, r'\{"name": ?".*", ?"age": ?\d+\}'),
        ({"guided_json": json.dumps(PERSON)}, r'\{"name": ?".*", ?"age": ?\d+\}'),
        ({"structured_outputs": {"regex": "ab{2}"}}, "abb"),
        ({"structured_outputs": {"json": PERSON, "choice": None}}, r"\{.*\}"),
        ({"structured": {"choice": ["one"]}}, "one"),
    ],
    ids=repr,
)
def test_the_words_of_vllm(tiny_client, form, pattern):
    text = tiny_chat(tiny_client, extra_body=form).choices[0].message.content
    assert re.fullmatch(pattern, text, re.DOTALL)
    answer = tiny_client.completions.create(
        model="tiny", prompt="Bob:", max_tokens=60, temperature=0, extra_body=form
    )
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL)


@pytest.mark.parametrize(
    ("options", "says", "param"),
    [
        (
            {"response_format": {"type": "xml"}},
            "text, json_object, json_schema, regex or grammar",
            None,
        ),
        ({"response_format": {"type": "json_schema"}}, "needs a schema", "response_format"),
        ({"response_format": json_schema({"type": "word"})}, "Invalid type: word", None),
        (
            {"response_format": json_schema({"items": {}, "uniqueItems": True}, strict=True)},
            "uniqueItems",
            None,
        ),
        ({"extra_body": {"guided_regex": "(a"}}, "unclosed group", None),
        ({"extra_body": {"guided_regex": "a" * 20_000}}, "16,384 characters", "guided_regex"),
        ({"extra_body": {"guided_choice": []}}, "1 to 1,024 strings", "guided_choice"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "Ask for one form", None),
        ({"extra_body": {"structured_outputs": {"regx": "a"}}}, "did you mean regex", None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
def test_forms_that_cannot_be_had(tiny_client, options, says, param, stream):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        tiny_chat(tiny_client, stream=stream, **options)
    assert param is None or caught.value.param == param
    assert "\n" not in caught.value.message


def test_what_cannot_be_enforced_is_left_out_unless_strict(client):
    loose = {**PERSON, "properties": {**PERSON["properties"], "age": {"const": 3}}}
    loose = {**loose, "not": {"required": ["zip"]}}
    answer = chat(client, response_format=json_schema(loose)).choices[0]
    assert json.loads(answer.message.content)["age"] == 3


def test_many_schemas_at_once(client):
    """Beside each other and beside plain chats, which they do not change."""
    schemas = [random_schema(seed) for seed in range(100, effort(103, 106))]
    plain = chat(client, max_tokens=8).choices[0].message.content

    def ask(schema):
        if schema is None:
            return chat(client, max_tokens=8).choices[0].message.content
        form = json_schema(schema, strict=True)
        answer = chat(client, response_format=form, temperature=1, max_tokens=700).choices[0]
        assert answer.finish_reason == "stop"
        return json.loads(answer.message.content)

    asked = [schema for pair in zip(schemas, [None] * len(schemas), strict=True) for schema in pair]
    with ThreadPoolExecutor(12) as threads:
        for schema, answer in zip(asked, threads.map(ask, asked), strict=True):
            if schema is None:
                assert answer == plain
            else:
                Draft202012Validator(schema).validate(answer)


# --- tools ------------------------------------------------------------------------------------


def joined(stream):
    """A streamed message put together as clients do it."""
    text, calls, reason = "", {}, None
    for part in stream:
        [choice] = part.choices
        text += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            call = calls.setdefault(piece.index, {"id": None, "name": "", "arguments": ""})
            call["id"] = call["id"] or piece.id
            call["name"] += piece.function.name or ""
            call["arguments"] += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return text, list(calls.values()), reason


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_call_that_is_forced(tiny_client, choice):
    options = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    whole = tiny_chat(tiny_client, ROME, **options).choices[0]
    [call] = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    if call.function.name == "get_weather":
        assert set(json.loads(call.function.arguments)) == {"city"}
    text, [streamed], reason = joined(tiny_chat(tiny_client, ROME, stream=True, **options))
    assert (text, reason) == ("", "tool_calls")
    assert streamed["name"] == call.function.name and streamed["id"]
    assert streamed["arguments"] == call.function.arguments


def test_a_named_function_is_the_one_that_is_called(client):
    choice = {"type": "function", "function": {"name": "clock"}}
    answer = chat(client, ROME, tools=[WEATHER, CLOCK], tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("clock", "{}")


def test_a_call_or_json_where_the_model_may_choose(client):
    answer = chat(client, ROME, tools=[WEATHER], response_format=json_schema(PERSON)).choices[0]
    if answer.message.tool_calls:
        assert answer.finish_reason == "tool_calls"
    else:
        assert set(json.loads(answer.message.content)) == {"name", "age"}


def test_tools_that_are_not_called(client):
    for choice in ("auto", "none"):
        answer = chat(client, BOB, tools=[CLOCK], tool_choice=choice, max_tokens=6).choices[0]
        assert answer.message.content or answer.message.tool_calls
    text, calls, reason = joined(chat(client, BOB, tools=[CLOCK], max_tokens=6, stream=True))
    again = chat(client, BOB, tools=[CLOCK], max_tokens=6).choices[0]
    assert text == (again.message.content or "") and len(calls) == len(
        again.message.tool_calls or []
    )
    assert reason == again.finish_reason


def test_the_results_of_calls_are_part_of_the_conversation(client, http):
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    message = chat(client, ROME, **options).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue as Quire"}'}
    turns = [*ROME, message.model_dump(exclude_none=True), result]
    with_result = chat(client, turns, tools=[WEATHER], max_tokens=2)
    without = chat(client, ROME, tools=[WEATHER], max_tokens=2)
    assert with_result.usage.prompt_tokens > without.usage.prompt_tokens + 20
    assert without.usage.prompt_tokens > chat(client, ROME, max_tokens=2).usage.prompt_tokens


def test_logprobs_of_a_call_cover_its_tokens(tiny_client):
    options = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    whole = tiny_chat(tiny_client, ROME, logprobs=True, **options).choices[0]
    count = sum(
        len(part.choices[0].logprobs.content)
        for part in tiny_chat(tiny_client, ROME, logprobs=True, stream=True, **options)
        if part.choices[0].logprobs is not None
    )
    assert count == len(whole.logprobs.content) > 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "more than once"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice must be"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clok"}}},
            "did you mean clock",
        ),
    ],
    ids=repr,
)
def test_bad_tools(tiny_client, options, says):
    with pytest.raises(openai.BadRequestError, match=says):
        tiny_chat(tiny_client, ROME, **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 14])
def test_a_call_that_is_cut_leaves_nothing_in_the_content(tiny_client, max_tokens, stream):
    """Of a message that is forced to be calls, no part is words, wherever it ends."""
    options = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": max_tokens}
    if stream:
        parts = [part.choices[0] for part in tiny_chat(tiny_client, ROME, stream=True, **options)]
        content = "".join(part.delta.content or "" for part in parts)
        reason = parts[-1].finish_reason
    else:
        choice = tiny_chat(tiny_client, ROME, **options).choices[0]
        content, reason = choice.message.content or "", choice.finish_reason
    assert content == "" and reason == "length"
