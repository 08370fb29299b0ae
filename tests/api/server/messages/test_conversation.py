"""Conversations in content blocks, as chat templates get them; what cannot be sent, by name."""

from __future__ import annotations

import pytest

from quire.api.server.messages import tools
from quire.api.server.messages.conversation import chat_messages, ends_open
from quire.errors import RequestError

CACHED = {"cache_control": {"type": "ephemeral"}}


def text(said: str, **others) -> dict:
    return {"type": "text", "text": said, **others}


def user(*blocks) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks) -> dict:
    return {"role": "assistant", "content": list(blocks)}


CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "import os"}
ANSWERED = {"role": "tool", "tool_call_id": "toolu_1", "content": "import os"}


def test_texts_and_blocks_say_the_same():
    plain = chat_messages("Be brief.", [{"role": "user", "content": "Hi"}])
    blocks = chat_messages([text("Be brief.", **CACHED)], [user(text("Hi", **CACHED))])
    assert plain == blocks
    assert plain == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_line_for_billing_is_no_part_of_the_prompt():
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=5f3a1;")
    said = [text("You are an agent.", **CACHED), text("Here are files.", **CACHED)]
    [system, _] = chat_messages([billing, *said], [user(text("Hi"))])
    assert system["content"] == "You are an agent.\nHere are files."
    assert chat_messages([billing], [user(text("Hi"))]) == [{"role": "user", "content": "Hi"}]


def test_messages_of_one_role_are_one_turn():
    turns = [user(text("a")), user(text("b")), assistant(text("c")), assistant(text("d"))]
    assert chat_messages(None, turns) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
    ]


def test_calls_results_and_thoughts():
    thought = {"type": "thinking", "thinking": "I need the file.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "bm90aGluZw=="}
    turns = chat_messages(
        None,
        [user(text("Look.")), assistant(thought, hidden, text("I read."), CALL), user(RESULT)],
    )
    assert turns[1] == {
        "role": "assistant",
        "content": "I read.",
        "reasoning_content": "I need the file.",
        "tool_calls": [
            {
                "id": "toolu_1",
                "type": "function",
                "function": {"name": "read", "arguments": {"path": "a.py"}},
            }
        ],
    }
    assert turns[2] == ANSWERED
    [_, silent, _] = chat_messages(None, [user(text("Look.")), assistant(CALL), user(RESULT)])
    assert silent["content"] is None and "reasoning_content" not in silent


def test_results_are_messages_of_the_tool_and_words_behind_them_are_the_users():
    parts = {**RESULT, "content": [text("import os"), text("import re")]}
    failed = {**RESULT, "content": "no such file", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "toolu_1"}
    turns = chat_messages(None, [user(parts, failed, empty, text("Go on."))])
    assert [turn["content"] for turn in turns] == [
        "import os\nimport re",
        "Error: no such file",
        "",
        "Go on.",
    ]
    assert [turn["role"] for turn in turns] == ["tool", "tool", "tool", "user"]


def test_an_answer_may_be_begun():
    assert ends_open([user(text("Hi")), assistant(text("Hello,"))])
    assert not ends_open([assistant(text("Hello,")), user(text("Hi"))])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "image", "source": {}}], r"messages\[0\].content\[0\] .* images are not"),
        ([text("a"), {"type": "document"}], r"messages\[0\].content\[1\] .* documents are not"),
        ([{"type": "server_tool_use"}], "'server_tool_use'; only text can be sent here"),
        ([{**RESULT, "content": [{"type": "image"}]}], r"content\[0\].content\[0\] .* images"),
        ([{"type": "tool_result"}], "needs tool_use_id"),
        ([{"type": "text"}], "needs text, which is a text"),
        (["Hi"], "must be a text or a list of content blocks"),
        (None, "must be a text or a list of content blocks"),
    ],
)
def test_what_cannot_be_sent_is_named(content, says):
    with pytest.raises(RequestError, match=says):
        chat_messages(None, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "owner", "content": "Hi"}, r"messages\[0\] needs a role"),
        ({"content": "Hi"}, r"messages\[0\] needs a role"),
        (assistant(CALL), "send its tool_result"),
        (assistant({**CALL, "input": "a.py"}), "needs input, which is an object"),
        (assistant({"type": "thinking"}), "needs thinking, which is a text"),
        (assistant({"type": {"a": 1}}), r"has the type .*; "),
    ],
)
def test_messages_that_cannot_be(message, says):
    with pytest.raises(RequestError, match=says):
        chat_messages(None, [message])


def test_tools_and_choices_as_openai_says_them():
    schema = {"type": "object", "properties": {}}
    given = {"name": "read", "description": "Reads.", "input_schema": schema, **CACHED}
    function = {"name": "read", "description": "Reads.", "parameters": schema}
    assert tools.functions([given]) == [{"type": "function", "function": function}]
    assert tools.functions([{**given, "type": "custom", "strict": True}]) == [
        {"type": "function", "function": {**function, "strict": True}}
    ]
    assert tools.functions(None) == []
    named = {"type": "function", "function": {"name": "read"}}
    assert tools.choice(None) == (None, True)
    assert tools.choice({"type": "any"}) == ("required", True)
    assert tools.choice({"type": "none"}) == ("none", True)
    assert tools.choice({"type": "tool", "name": "read"}) == (named, True)
    assert tools.choice({"type": "auto", "disable_parallel_tool_use": True}) == ("auto", False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "a tool that Anthropic defines"),
        ({"name": "read"}, "needs an input_schema"),
        ("read", "must be an object"),
    ],
)
def test_tools_that_cannot_be(given, says):
    with pytest.raises(RequestError, match=rf"tools\[0\] .*{says}"):
        tools.functions([given])


def test_a_choice_that_cannot_be():
    with pytest.raises(RequestError, match="tool_choice must have the type"):
        tools.choice({"type": "required"})
