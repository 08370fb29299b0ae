"""A bad `pattern`, `type` or schema in a tool or a format kills the worker.

CVE-2025-48944, CVE-2025-48942, CVE-2025-48943.
"""

from __future__ import annotations

import pytest
from bystander import bystander

BAD_SCHEMAS = [
    {"type": "something"},
    {"type": ["object", 7]},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?<=a)b\\1"},
    {"type": "object", "properties": {"a": {"pattern": "*"}}},
    {"type": "object", "properties": []},
    {"$ref": "#/nowhere"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"items": {"$ref": "#"}, "minItems": -1},
    {"enum": []},
    {"anyOf": [{"allOf": [{"not": {}}]}]},
    7,
    None,
]


def chats(schema: object) -> list[dict[str, object]]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return [
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [{**tool, "function": {**tool["function"], "strict": True}}]},
        {"response_format": form},
        {"structured_outputs": {"json": schema}},
    ]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_it_is_a_400_and_everyone_else_goes_on(tiny_server, schema):
    engine = tiny_server.engine_pid
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with tiny_server.http() as http, bystander(tiny_server, max_tokens=10):
        for body in chats(schema):
            answer = http.post("/v1/chat/completions", json={**talk, **body})
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for pattern in ("(", "[", "a{2,1}", "(?P<n>"):
            body = {"prompt": "hi", "max_tokens": 2, "guided_regex": pattern}
            assert http.post("/v1/completions", json=body).status_code == 400
    assert tiny_server.engine_pid == engine
