"""Custom tools through OpenAI's client; a grammar makes a model with random weights call them."""

from __future__ import annotations

import re

import openai
import pytest

LARK = 'start: term ("+" term)*\nterm: /[1-9]/'
SUM = re.compile(r"[1-9](\+[1-9])*")
CODE = re.compile("run [a-z]{3}")
HELLO = [{"role": "user", "content": "Add them."}]


def grammar(syntax: str, definition: str) -> dict:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def custom(name: str, **fields: object) -> dict:
    return {"type": "custom", "custom": {"name": name, **fields}}


ADD = custom("add", description="Adds.", format=grammar("lark", LARK))
RUN = custom("run", format=grammar("regex", CODE.pattern))
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module", params=["quick", "thinking"])
def client(request) -> openai.OpenAI:
    return request.getfixturevalue(request.param).openai()


def ask(client: openai.OpenAI, **options):
    extra = {"thinking_token_budget": 4}
    asked = {"max_tokens": 120, "seed": 2, "messages": HELLO, "extra_body": extra, **options}
    return client.chat.completions.create(model="tiny", **asked)


@pytest.mark.parametrize(
    ("tools", "choice", "name", "form"),
    [
        ([ADD, CLOCK], custom("add"), "add", SUM),
        ([ADD], "required", "add", SUM),
        ([RUN, CLOCK], custom("run"), "run", CODE),
        ([RUN, custom("also", format=grammar("regex", CODE.pattern))], "required", None, CODE),
    ],
)
def test_a_call_has_an_input_by_its_grammar(client, tools, choice, name, form):
    options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    options["logit_bias"] = {} if form is CODE else {str(client_plus(client)): -5.0}
    [found] = ask(client, **options).choices
    [call] = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert call.type == "custom" and name in (None, call.custom.name)
    assert form.fullmatch(call.custom.input), call
    parts = list(ask(client, stream=True, **options))
    pieces = [each for part in parts for each in part.choices[0].delta.tool_calls or ()]
    assert pieces[0].type == "custom" and pieces[0].custom["name"] == call.custom.name
    assert "".join(each.custom["input"] for each in pieces) == call.custom.input
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def client_plus(client: openai.OpenAI) -> int:
    """The token of "+", which would come half of the time for ever."""
    answer = client.post("/tokenize", body={"prompt": "+"}, cast_to=dict)
    return answer["tokens"][0]


def test_a_conversation_with_calls_goes_on(client):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "add", "input": "1+1"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    answer = ask(client, messages=messages, tools=[ADD], tool_choice="none", max_tokens=8)
    assert not answer.choices[0].message.tool_calls


def test_a_grammar_that_is_none_is_told(client):
    with pytest.raises(openai.BadRequestError, match="cannot be used"):
        bad = custom("bad", format=grammar("lark", "start: missing"))
        ask(client, tools=[bad], tool_choice=custom("bad"))


def test_responses(client):
    by = {"type": "grammar", "syntax": "regex", "definition": CODE.pattern}
    tool = {"type": "custom", "name": "run", "format": by}
    options = {
        "model": "tiny",
        "tools": [tool],
        "tool_choice": {"type": "custom", "name": "run"},
        "max_output_tokens": 60,
        "extra_body": {"seed": 2, "thinking_token_budget": 4},
    }
    response = client.responses.create(input="Run it.", **options)
    call = response.output[-1]
    assert call.type == "custom_tool_call" and call.name == "run" and CODE.fullmatch(call.input)
    said, done = "", None
    for event in client.responses.create(input="Run it.", stream=True, **options):
        if event.type == "response.custom_tool_call_input.delta":
            said += event.delta
        elif event.type == "response.custom_tool_call_input.done":
            done = event.input
    assert said == done == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    answer = client.responses.create(
        model="tiny",
        input=[result],
        previous_response_id=response.id,
        max_output_tokens=8,
        extra_body={"thinking_token_budget": 1, "ignore_eos": True},
    )
    assert answer.output[-1].type == "message"
