"""Anthropic's own client, against the real model."""

from __future__ import annotations

import json
from typing import Any

import pytest

HI = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}
GREEDY = {"temperature": 0, "top_k": 1, "top_p": 0.9}


@pytest.fixture(scope="module")
def claude(server):
    return server.anthropic()


def asked(**others) -> dict[str, Any]:
    """What a request asks for; greedily, so that it has one answer."""
    return {
        "model": "smollm2",
        "max_tokens": 24,
        "messages": HI,
        "extra_body": GREEDY,
        **others,
    }


def prompt_tokens(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def content(message) -> list[dict]:
    """Without the ids of calls, which every answer has of its own."""
    blocks = [block.to_dict() for block in message.content]
    return [
        {k: v for k, v in block.items() if k in ("type", "text", "name", "input")}
        for block in blocks
    ]


def test_a_message_and_its_stream_say_the_same(claude):
    whole = claude.messages.create(**asked())
    [block] = whole.content
    assert whole.id.startswith("msg_") and whole.role == "assistant" and whole.type == "message"
    assert whole.model == "smollm2" and block.type == "text" and block.text
    with claude.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert content(final) == content(whole)
    assert final.stop_reason == whole.stop_reason in ("end_turn", "max_tokens")
    assert final.usage.output_tokens == whole.usage.output_tokens <= 24
    assert final.usage.cache_read_input_tokens > 0  # of the first request's prompt
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


def test_the_count_of_tokens_is_the_prompts(claude):
    prompt = {"system": "Be brief.", "messages": HI, "tools": [WEATHER]}
    count = claude.messages.count_tokens(model="smollm2", **prompt)
    answer = claude.messages.create(**asked(**prompt, max_tokens=1))
    assert count.input_tokens == prompt_tokens(answer.usage)
    assert answer.stop_reason == "max_tokens"


def test_stop_sequences(claude):
    whole = claude.messages.create(**asked()).content[0].text
    stop = whole[6:9]
    stopped = asked(stop_sequences=["~~", stop])
    cut = claude.messages.create(**stopped)
    assert cut.content[0].text == whole[: whole.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    with claude.messages.stream(**stopped) as stream:
        final = stream.get_final_message()
    assert content(final) == content(cut)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_the_answer_goes_on_where_its_beginning_ends(claude):
    begun = [*HI, {"role": "assistant", "content": "Hello, my dear"}]
    answer = claude.messages.create(**asked(messages=begun))
    assert answer.content[0].text and not answer.content[0].text.startswith("Hello")
    with_special = [*HI, {"role": "assistant", "content": "The tag <|im_end|> ends"}]
    count = claude.messages.count_tokens(model="smollm2", messages=with_special)
    ended = [*HI, {"role": "assistant", "content": "The tag"}]
    assert (
        count.input_tokens
        > claude.messages.count_tokens(model="smollm2", messages=ended).input_tokens
    )


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}],
    ids=["any", "tool"],
)
def test_a_call_and_its_result(claude, choice):
    tools = asked(tools=[WEATHER], tool_choice=choice, max_tokens=64)
    answer = claude.messages.create(**tools)
    [call] = answer.content
    assert answer.stop_reason == "tool_use"
    assert call.type == "tool_use" and call.id.startswith("toolu_")
    assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
    with claude.messages.stream(**tools) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert content(final) == content(answer) and final.stop_reason == "tool_use"
    assert json.loads("".join(pieces)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
    messages = [*HI, answer.to_param(), {"role": "user", "content": [result]}]
    reply = claude.messages.create(**asked(tools=[WEATHER], messages=messages))
    assert reply.content[0].type == "text"
    assert reply.usage.cache_read_input_tokens > 0


def test_the_clients_tool_runner(claude, anthropic):
    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        cities.append(city)
        return "It is sunny."

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = claude.beta.messages.tool_runner(
        **asked(max_tokens=64), tools=[weather], tool_choice=choice, max_iterations=2
    )
    messages = list(runner)
    assert len(messages) == 2 and messages[0].stop_reason == "tool_use"
    assert cities


def test_threads_are_refused_so_that_the_client_sends_conversations(claude, anthropic):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**asked(extra_body={"thread": {"type": "create"}}))
    assert caught.value.error_code == "thread_unsupported_request"


def test_an_answer_in_a_form(claude):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = claude.messages.create(**asked(output_config=form))
    assert json.loads(answer.content[0].text)["city"] in ("Rome", "Oslo")
    old = claude.messages.create(**asked(extra_body={**GREEDY, "output_format": form["format"]}))
    assert content(old) == content(answer)


@pytest.mark.parametrize(
    "thinking",
    [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}],
    ids=lambda each: each["type"],
)
def test_a_model_that_cannot_think_answers_anyway(claude, thinking):
    answer = claude.messages.create(**asked(thinking=thinking, max_tokens=2))
    assert answer.content[0].type == "text"


def test_errors_are_the_clients_own(claude, strict, anthropic):
    with pytest.raises(anthropic.NotFoundError, match="not served here") as caught:
        claude.messages.create(**asked(model="claude-opus-4-1"))
    assert caught.value.type == "not_found_error"
    error = caught.value
    assert error.request_id == error.response.headers["x-request-id"] == error.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
        image = {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
        claude.messages.create(**asked(messages=[{"role": "user", "content": [image]}]))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(**asked(max_tokens=0))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as caught:
        claude.messages.create(**asked(messages=[{"role": "user", "content": "far " * 9000}]))
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="--batch-dir"):
        claude.beta.files.list()
    with pytest.raises(anthropic.ContentTooLargeError) as caught:
        long = [{"role": "user", "content": "x" * 200_000}]
        strict.anthropic("sk-one").messages.create(**asked(messages=long))
    assert caught.value.type == "request_too_large"


def test_keys_in_either_header(strict, anthropic):
    ask = asked(model="tiny", max_tokens=1)
    assert strict.anthropic("sk-one").messages.create(**ask).usage.output_tokens == 1
    bearer = strict.anthropic(None, auth_token="sk-one")
    assert bearer.messages.create(**ask).usage.cache_read_input_tokens > 16  # one tenant
    other = strict.anthropic("sk-two")
    # It may have cached how every chat begins, by another test; but not a block of this one.
    assert other.messages.create(**ask).usage.cache_read_input_tokens < 16
    with pytest.raises(anthropic.AuthenticationError) as caught:
        strict.anthropic("sk-wrong").messages.create(**ask)
    assert caught.value.type == "authentication_error"
    assert [model.id for model in strict.anthropic("sk-one").models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "no JSON"), (b"[]", "one JSON object"), (b'{"max_tokens": 1}', "messages")],
)
def test_bodies_that_are_none(http, content, says):
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/messages", content=content, headers=headers)
    found = response.json()
    assert response.status_code == 400 and found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error" and says in found["error"]["message"]
    assert http.get("/v1/messages").json()["type"] == "error"  # a 405
