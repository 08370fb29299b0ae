"""Tools and tool_choice as requests have them; conversations as templates want them."""

from __future__ import annotations

import json

import pytest

from quire.api.tools.conversation import in_words, with_objects
from quire.api.tools.definitions import (
    MAX_TOOLS,
    ToolChoice,
    choose_tools,
    read_choice,
    read_tools,
)
from quire.errors import RequestError
from quire.models.text.chat_template import render
from quire.models.text.template_tools import takes_tools


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def test_parameters_left_out_are_none():
    [read] = read_tools([tool()])
    assert read.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    [read] = read_tools([tool(parameters={"properties": {"a": {}}})])
    assert read.parameters == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    "given",
    [
        7,
        "f",
        [7],
        [{}],
        [{"type": "function"}],
        [{"type": "web_search"}],
        [tool(name="")],
        [tool(name="a b")],
        [tool(name="x" * 129)],
        [tool(name=7)],
        [tool(parameters=[])],
        [tool(description=7)],
        [tool(strict="yes")],
        [tool(), tool()],
        [tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)],
    ],
    ids=repr,
)
def test_bad_tools_are_refused_in_one_sentence(given):
    with pytest.raises(RequestError, match=r"^tools") as caught:
        read_tools(given)
    assert "\n" not in str(caught.value)


def test_choices():
    tools = read_tools([tool("one"), tool("two")])
    assert read_choice(None, tools) == ToolChoice("auto")
    assert read_choice(None, []) == read_choice("auto", []) == ToolChoice("none")
    assert read_choice("none", tools) == ToolChoice("none")
    assert read_choice("required", tools).is_forced
    named = {"type": "function", "function": {"name": "two"}}
    assert read_choice(named, tools) == ToolChoice("function", "two")


@pytest.mark.parametrize(
    "given",
    ["any", 7, {}, {"type": "function"}, {"type": "function", "function": {"name": "tow"}}, []],
    ids=repr,
)
def test_bad_choices_are_refused_in_one_sentence(given):
    with pytest.raises(RequestError, match=r"^tool_choice"):
        read_choice(given, read_tools([tool("two")]))
    with pytest.raises(RequestError, match=r"^tool_choice"):
        read_choice("required", [])


def allowed(mode="auto", names=("two",), **others):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools, **others}}


def test_some_tools_may_be_allowed():
    tools = read_tools([tool("one"), tool("two"), tool("three")])
    assert choose_tools("auto", tools) == (tools, ToolChoice("auto"))
    assert choose_tools(allowed(), tools) == (tools[1:2], ToolChoice("auto"))
    both = choose_tools(allowed("required", ("three", "one")), tools)
    assert both == ([tools[0], tools[2]], ToolChoice("required"))
    assert choose_tools(allowed(names=()), tools) == ([], ToolChoice("none"))


@pytest.mark.parametrize(
    "given",
    [
        {"type": "allowed_tools"},
        allowed("none"),
        allowed(names=("four",)),
        allowed(tools=["auto"]),
        allowed("required", ()),
    ],
    ids=repr,
)
def test_bad_lists_of_allowed_tools_are_refused_in_one_sentence(given):
    with pytest.raises(RequestError, match=r"^tool_choice"):
        choose_tools(given, read_tools([tool("two")]))


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Call f."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "43"}]},
]


def test_arguments_become_objects_for_templates():
    [call] = with_objects(TURNS)[2]["tool_calls"]
    assert call["function"]["arguments"] == {"a": 1}
    assert TURNS[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'  # ours is a copy


@pytest.mark.parametrize("arguments", ["{broken", 7, None, ["x"], "[" * 100_000])
def test_odd_arguments_do_no_harm(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call, 7, {}]}
    assert with_objects([turn, 7, {"tool_calls": "x"}])[0]["tool_calls"][0] == call
    assert "<tool_call>" in in_words([turn], [])[0]["content"]


def test_in_words_for_templates_without_tools():
    tools = read_tools([tool("f", description="Does it.")])
    system, user, assistant, results = in_words(TURNS, tools)
    assert system["content"].startswith("Be brief.\n\n") and '"Does it."' in system["content"]
    assert user == TURNS[1]
    assert assistant["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>") == 2 and "43" in results["content"]
    assert in_words(TURNS[1:2], tools)[0]["role"] == "system"


HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


def test_templates_that_take_tools_get_them():
    assert takes_tools(HERMES)
    assert not takes_tools("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not takes_tools("{% set tools = [] %}{{ tools }}")
    assert not takes_tools("{% broken")
    given = [each.given for each in read_tools([tool("f")])]
    text = render(HERMES, with_objects(TURNS), variables={"tools": given})
    assert json.dumps(given[0]) in text and 'assistant:{"a": 1};' in text
