"""Requests to /v1/messages as agents send them: their headers, their fields, their long systems.

The bodies are written after what Claude Code, LiteLLM and Cline send, shortened.
"""

from __future__ import annotations

import json

import pytest

CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "User-Agent": "claude-cli/2.1.10 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}


def tool(name: str, **properties: str) -> dict:
    fields = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    return {
        "name": name,
        "description": f"{name}: use it with care.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": fields,
            "required": list(properties)[:1],
            "additionalProperties": False,
        },
    }


TOOLS = [
    tool("Bash", command="string", timeout="number", run_in_background="boolean"),
    tool("Read", file_path="string", offset="number", limit="number"),
    tool("Edit", file_path="string", old_string="string", new_string="string"),
    tool("mcp__github__list_issues", owner="string", repo="string"),
]
FIRST_TURN = {
    "model": "smollm2",
    "max_tokens": 8,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_0f_account__session_1b2c3d4e"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.10; cch=1a2b3;"},
        {"type": "text", "text": "You are a coding agent for the terminal.", **CACHED},
        {"type": "text", "text": "# Tone\n" + "Answer in few words. " * 20, **CACHED},
    ],
    "tools": [*TOOLS[:-1], {**TOOLS[-1], **CACHED}],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date.\n</system-reminder>"},
                {"type": "text", "text": "Which files are here?", **CACHED},
            ],
        }
    ],
}
CALLED = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "I list them.", "signature": "EqQBCkYIBRgC"},
        {"type": "text", "text": "I look."},
        {
            "type": "tool_use",
            "id": "toolu_01A09q90qw90lq917835lq9",
            "name": "Bash",
            "input": {"command": "ls"},
            "caller": {"type": "direct"},
        },
    ],
}
ANSWERED = {
    "role": "user",
    "content": [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_01A09q90qw90lq917835lq9",
            "content": [{"type": "text", "text": "a.py\nb.py"}],
            "is_error": False,
            **CACHED,
        },
        {"type": "text", "text": "<system-reminder>Be quick.</system-reminder>"},
    ],
}
SECOND_TURN = {**FIRST_TURN, "messages": [*FIRST_TURN["messages"], CALLED, ANSWERED]}
# A title for the conversation, asked for in a form.
TITLE = {
    "model": "smollm2",
    "max_tokens": 32,
    "stream": True,
    "temperature": 0,
    "system": [{"type": "text", "text": "Write a title of one word."}],
    "tools": [],
    "output_config": {
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string", "maxLength": 9}},
                "required": ["title"],
                "additionalProperties": False,
            },
        }
    },
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Which files?"}]}],
}
LITELLM = {
    "model": "smollm2",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "tools": [{**TOOLS[1], "type": "custom"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "stop_sequences": ["\n\nHuman:"],
    "service_tier": "auto",
}


def events(http, body: dict) -> list[dict]:
    with http.stream("POST", "/v1/messages?beta=true", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    found = []
    for each in text.strip().split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("body", [FIRST_TURN, SECOND_TURN], ids=["first", "second"])
def test_a_coding_agents_turns(http, body):
    start, *rest = events(http, body)
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    counted = http.post(
        "/v1/messages/count_tokens?beta=true",
        json={key: body[key] for key in ("model", "system", "messages", "tools", "thinking")},
        headers=HEADERS,
    ).json()
    usage = message["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert rest[-1] == {"type": "message_stop"}
    assert rest[-2]["type"] == "message_delta" and rest[-2]["delta"]["stop_reason"]


def test_a_turn_begins_with_what_the_one_before_has_cached(http):
    """Although the system's first line differs with each request."""
    events(http, FIRST_TURN)
    [billing, *system] = FIRST_TURN["system"]
    billing = {**billing, "text": billing["text"].replace("1a2b3", "9f8e7")}
    start, *_ = events(http, {**SECOND_TURN, "system": [billing, *system]})
    usage = start["message"]["usage"]
    assert usage["cache_read_input_tokens"] > 0.6 * usage["input_tokens"]


def test_a_coding_agents_title(http):
    deltas = [each["delta"] for each in events(http, TITLE) if "index" in each and "delta" in each]
    title = json.loads("".join(delta["text"] for delta in deltas))
    assert list(title) == ["title"] and len(title["title"]) <= 9


def test_litellms_messages(http):
    response = http.post("/v1/messages", json=LITELLM, headers=HEADERS)
    answer = response.json()
    assert response.status_code == 200 and answer["type"] == "message"
    assert answer["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert response.headers["request-id"] == response.headers["x-request-id"]
