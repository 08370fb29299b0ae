"""Every field that OpenAI's client can send is honoured or refused, none dropped in silence."""

from __future__ import annotations

import jsonschema
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from quire.api.server.errors import ApiError
from quire.api.server.schema.chat import ChatRequest
from quire.api.server.schema.completions import CompletionRequest
from quire.api.server.schema.responses import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]


def names(params: type) -> set[str]:
    return {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}


CASES = [
    (CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming),
    (ChatRequest, chat_create_params.CompletionCreateParamsNonStreaming),
    (ResponsesRequest, response_create_params.ResponseCreateParamsNonStreaming),
]


@pytest.mark.parametrize(("request_type", "params"), CASES)
def test_each_is_a_field_or_refused(request_type, params):
    known = set(request_type.model_fields) | set(request_type.NOT_SUPPORTED)
    assert names(params) - known == set()


NAMED = [
    {"type": "function", "function": {"name": "a"}},
    {"type": "custom", "custom": {"name": "a"}},
]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMED}}


@pytest.mark.parametrize("choice", ["auto", *NAMED, ALLOWED], ids=str)
def test_the_document_has_every_choice_of_a_tool(choice):
    document = ChatRequest.model_json_schema()["properties"]["tool_choice"]
    jsonschema.validate(choice, document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"type": "custom", "function": {"name": "a"}}, document)


@pytest.mark.parametrize("name", sorted(ChatRequest.NOT_SUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name):
    with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
        ChatRequest(messages=HI, **{name: {"something": 1}}).refuse_unsupported()
    assert caught.value.param == name
    for neutral in (None, *ChatRequest.NOT_SUPPORTED[name]):
        ChatRequest(messages=HI, **{name: neutral}).refuse_unsupported()
