"""LiteLLM, as a client of OpenAI's, vLLM's and Anthropic's servers, and of the Responses API."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
OPTIONS: dict[str, Any] = {"temperature": 0, "api_key": "none"}
PROVIDERS = pytest.mark.parametrize("name", ["openai/smollm2", "hosted_vllm/smollm2"])


@PROVIDERS
def test_chats(name: str, url: str) -> None:
    options = {**OPTIONS, "model": name, "messages": HELLO, "api_base": url, "max_tokens": 8}
    whole = litellm.completion(**options).choices[0]
    parts = litellm.completion(**options, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
    assert whole.finish_reason == "length"


@PROVIDERS
def test_tools(name: str, url: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    options = {**OPTIONS, "api_base": url, "max_tokens": 40, "tool_choice": "required"}
    answer = litellm.completion(model=name, messages=HELLO, tools=tools, **options)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"


def test_anthropics_messages(url: str) -> None:
    place = {"model": "anthropic/smollm2", "api_base": url.removesuffix("/v1")}
    options = {**OPTIONS, **place, "messages": HELLO, "max_tokens": 8}
    whole = litellm.completion(**options).choices[0]
    parts = litellm.completion(**options, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
    assert whole.finish_reason == "length"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    forced = {**options, "max_tokens": 40, "tools": tools, "tool_choice": "required"}
    [call] = litellm.completion(**forced).choices[0].message.tool_calls
    assert call.function.name == "weather"


@pytest.mark.parametrize("name", ["openai/smollm2", "hosted_vllm/smollm2", "anthropic/smollm2"])
def test_a_conversation_that_is_too_long_is_known_as_such(name: str, url: str) -> None:
    base = url.removesuffix("/v1") if name.startswith("anthropic") else url
    long = [{"role": "user", "content": "far " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**OPTIONS, model=name, messages=long, api_base=base, max_tokens=8)


@PROVIDERS
def test_responses(name: str, url: str) -> None:
    options = {**OPTIONS, "model": name, "api_base": url, "max_output_tokens": 8}
    first = litellm.responses(input="Say hello.", **options)
    events = list(litellm.responses(input="Say hello.", stream=True, **options))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == first.output[0].content[0].text != ""
    assert first.status == "incomplete"
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    called = litellm.responses(
        input="The weather in Rome?",
        tools=tools,
        tool_choice="required",
        **{**options, "max_output_tokens": 40},
    )
    assert called.output[0].name == "weather"


def test_a_conversation_goes_on_by_its_response(url: str) -> None:
    options = {**OPTIONS, "model": "openai/smollm2", "api_base": url, "max_output_tokens": 8}
    first = litellm.responses(input="My name is Ann.", **options)
    second = litellm.responses(input="My name?", previous_response_id=first.id, **options)
    assert second.usage.input_tokens > first.usage.input_tokens
