"""Items of the Responses API: how they are read, and the conversation that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.server.errors import ApiError
from quire.api.server.responses.items import as_messages, read_input
from quire.api.server.responses.tools import chat_tool_choice, chat_tools

CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "clock", "arguments": '{"a": 1}'},
}


def find(item_id: str) -> dict[str, Any]:
    raise ApiError(404, f"no {item_id}")


def messages(*items: Any) -> list[dict[str, Any]]:
    return as_messages(read_input(list(items), find))


def thought(text: str, name: str = "content") -> dict[str, Any]:
    kind = {"content": "reasoning_text", "summary": "summary_text"}[name]
    return {"type": "reasoning", name: [{"type": kind, "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }


def test_a_text_is_a_message_of_the_user() -> None:
    [item] = read_input("Hi", find)
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "input_text", "text": "Hi"}]
    assert as_messages([item]) == [{"role": "user", "content": "Hi"}]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    turn = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [CHAT_CALL, CHAT_CALL],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    for hm in (thought("Hm."), thought("Hm.", "summary")):
        found = messages({"role": "user", "content": "Hi"}, hm, said("I look."), CALL, CALL, RESULT)
        assert found == [{"role": "user", "content": "Hi"}, turn, result]


def test_what_begins_another_message() -> None:
    assert messages(said("a"), said("b")) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert [each["content"] for each in messages(CALL, said("b"))] == ["b"]
    assert len(messages(CALL, thought("Hm."), CALL)) == 2
    assert len(messages(CALL, RESULT, CALL)) == 3
    assert messages(thought("Hm.")) == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    ]
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "x"}) == []


def test_parts_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = messages({"role": "developer", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [result] = messages({**RESULT, "output": parts[:1]})
    assert result["content"] == "a"
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(refusal) == [{"role": "assistant", "content": "No."}]


def test_a_reference_stands_for_a_stored_item() -> None:
    stored = read_input([CALL], find)[0]
    kept = {"fc_1": stored}
    reference = {"type": "item_reference", "id": "fc_1"}
    assert read_input([reference, {"id": "fc_1"}], kept.__getitem__) == [stored, stored]
    with pytest.raises(ApiError, match="fc_2"):
        read_input([{"type": "item_reference", "id": "fc_2"}], find)


@pytest.mark.parametrize(
    "given",
    [
        7,
        [7],
        [{}],
        [{"type": "web_search_call"}],
        [{"type": ["message"]}],
        [{"role": "user", "content": [{"type": ["input_text"]}]}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{**CALL, "arguments": {}}],
        [{**RESULT, "output": 7}],
        [{**RESULT, "call_id": None}],
        [{"type": "reasoning", "summary": "x"}],
        [{"type": "item_reference"}],
        [said("x")] * 4097,
    ],
    ids=lambda given: repr(given)[:60],
)
def test_bad_input_is_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(ApiError, match=r"^input") as caught:
        read_input(given, find)
    assert (caught.value.status, caught.value.param) == (400, "input")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_tools_are_those_of_chats() -> None:
    schema = {"type": "object", "properties": {}}
    given = {"type": "function", "name": "f", "parameters": schema, "strict": None}
    assert chat_tools([given]) == [
        {"type": "function", "function": {"name": "f", "parameters": schema}}
    ]
    assert chat_tools(None) == []
    named = {"type": "function", "function": {"name": "f"}}
    assert chat_tool_choice({"type": "function", "name": "f"}) == named
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert chat_tool_choice({"type": "allowed_tools", **allowed}) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    assert chat_tool_choice("auto") == "auto"


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", None])
def test_other_tools_are_refused_by_name(kind: str | None) -> None:
    with pytest.raises(ApiError, match=rf"tools\[0\] is of the type '{kind}'") as caught:
        chat_tools([{"type": kind}])
    assert caught.value.param == "tools"
    with pytest.raises(ApiError, match=f"'{kind}'"):
        chat_tool_choice({"type": kind})
