"""Requests to /v1/responses as a coding agent sends them: tools that only OpenAI runs, tools of MCP
servers in namespaces, a custom tool with a grammar, and all of the history each time.

The bodies are written after what Codex sends, shortened.
"""

from __future__ import annotations

import json

import pytest

HEADERS = {
    "Authorization": "Bearer none",
    "OpenAI-Beta": "responses=experimental",
    "originator": "codex_cli_rs",
    "session_id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "version": "0.147.0",
    "Accept": "text/event-stream",
}
PATCH = 'start: "*** Begin Patch\\n" LINE+ "*** End Patch"\nLINE: "+" /[a-z ]{0,9}/ "\\n"'
NAMES = {
    "type": "object",
    "properties": {"owner": {"type": "string", "maxLength": 5}},
    "required": ["owner"],
    "additionalProperties": False,
}
GITHUB = {
    "type": "namespace",
    "name": "mcp__github",
    "description": "Tools in the mcp__github namespace.",
    "tools": [
        {
            "type": "function",
            "name": "list_issues",
            "description": "Lists issues.",
            "strict": False,
            "parameters": NAMES,
        }
    ],
}
TOOLS = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
    },
    GITHUB,
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]


def said(role: str, text: str) -> dict:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


FIRST_TURN = {
    "model": "smollm2",
    "instructions": "You are a coding agent. " * 10,
    "input": [
        said("developer", "<permissions instructions>\nAsk first.\n</permissions instructions>"),
        said("user", "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>"),
        said("user", "Which issues are open?"),
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1b2c"},
    "max_output_tokens": 8,  # so that the answer is short
}
CALLED = [
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {
        "type": "function_call",
        "name": "list_issues",
        "namespace": "mcp__github",
        "arguments": '{"owner": "me"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "[]"},
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": "*** Begin Patch\n+a\n*** End Patch",
    },
    {
        "type": "custom_tool_call_output",
        "call_id": "call_2",
        "output": [{"type": "input_text", "text": "Done."}],
    },
]
SECOND_TURN = {**FIRST_TURN, "input": [*FIRST_TURN["input"], *CALLED]}


def events(http, body: dict) -> list[dict]:
    with http.stream("POST", "/v1/responses", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, response.read()
        text = response.read().decode()
    return [json.loads(each.split("\ndata: ")[1]) for each in text.strip().split("\n\n")]


@pytest.mark.parametrize("body", [FIRST_TURN, SECOND_TURN], ids=["first", "second"])
def test_a_coding_agents_turns(http, body):
    first, *_, last = events(http, body)
    assert first["type"] == "response.created" and first["response"]["tools"] == TOOLS
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["usage"]["input_tokens"] > 100


LIST_ISSUES = {"type": "function", "namespace": "mcp__github", "name": "list_issues"}


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", False), ("required", True), (LIST_ISSUES, False)]
)
def test_a_call_of_a_tool_in_a_namespace_has_both_names(http, choice, stream):
    body = {**FIRST_TURN, "tools": [GITHUB, TOOLS[3]], "tool_choice": choice}
    body |= {"stream": stream, "parallel_tool_calls": False, "max_output_tokens": 60}
    if stream:
        *_, done, ended = events(http, body)
        assert done["type"] == "response.output_item.done"
        output = ended["response"]["output"]
        assert done["item"] == output[-1]
    else:
        output = http.post("/v1/responses", json=body, headers=HEADERS).json()["output"]
    [call] = output
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call",
        "mcp__github",
        "list_issues",
    )
    assert list(json.loads(call["arguments"])) == ["owner"]


def test_the_history_names_tools_as_the_model_does(http):
    """What a namespace's call is in the prompt, and what would be one of another tool."""

    def count(namespace: str | None) -> int:
        called = {**CALLED[1], "namespace": namespace}
        body = {"model": "smollm2", "input": [said("user", "Hi"), called, CALLED[2]]}
        answer = http.post("/v1/responses/input_tokens", json=body).json()
        return answer["input_tokens"]

    assert count("mcp__github") > count(None)


def test_tools_that_only_openai_runs_are_left_out_only_beside_others(http):
    alone = {**FIRST_TURN, "tools": TOOLS[3:], "stream": False}
    refused = http.post("/v1/responses", json=alone, headers=HEADERS)
    assert refused.status_code == 400 and "web_search" in refused.json()["error"]["message"]
    demanded = {**FIRST_TURN, "tool_choice": {"type": "web_search"}, "stream": False}
    refused = http.post("/v1/responses", json=demanded, headers=HEADERS)
    assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]
    for tools in (
        [{"type": "namespace", "name": "a"}],
        [{**GITHUB, "name": ""}],
        [{**GITHUB, "tools": [{"type": "x"}]}],
    ):
        refused = http.post("/v1/responses", json={**FIRST_TURN, "tools": tools, "stream": False})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
