"""The Responses API of a real server, through OpenAI's own client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from patience import PATIENCE_S
from pydantic import BaseModel

GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_output_tokens": 8}
HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": True}
OPENING = ["response.created", "response.in_progress"]
MESSAGE_BEGINS = ["response.output_item.added", "response.content_part.added"]
MESSAGE_ENDS = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def create(client: openai.OpenAI, **options: Any) -> Response:
    return client.responses.create(**{**GREEDY, "input": "Say hello.", **options})


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(create(client, stream=True, **options))


def plain(response: Response) -> dict[str, Any]:
    """What two answers to the same have in common."""
    found = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in found["output"]:
        item["id"] = item["call_id"] = None
    found["usage"]["input_tokens_details"] = None
    return found


def test_it_is_what_a_chat_would_say(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "You are a pirate."}
    chat = client.chat.completions.create(
        model="smollm2", messages=[system, *HELLO], temperature=0, max_tokens=8
    )
    said = chat.choices[0].message.content
    parts = [{"type": "input_text", "text": "Say hello."}]
    for asked in ("Say hello.", HELLO, [{"type": "message", "role": "user", "content": parts}]):
        answer = create(client, input=asked, instructions="You are a pirate.")
        Response.model_validate(answer.model_dump())
        assert answer.output_text == said
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == 8
    assert create(client, input=[system, *HELLO]).output_text == said
    counted = client.responses.input_tokens.count(input=HELLO, instructions="You are a pirate.")
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("limit", [8, 40])
def test_a_stream_is_the_same_response(client: openai.OpenAI, limit: int) -> None:
    whole = create(client, max_output_tokens=limit, metadata={"a": "b"})
    events = stream(client, max_output_tokens=limit, metadata={"a": "b"})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    between = ["response.output_text.delta"] * len(deltas)
    last = f"response.{whole.status}"
    assert kinds == [*OPENING, *MESSAGE_BEGINS, *between, *MESSAGE_ENDS, last]
    assert "".join(deltas) == whole.output_text
    assert whole.status == ("incomplete" if limit == 8 else "completed")
    assert plain(events[-1].response) == plain(whole)
    assert events[0].response.output == [] and events[0].response.usage is None
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response
    options = {**GREEDY, "max_output_tokens": limit, "input": "Say hello."}
    with client.responses.stream(**options) as manager:
        texts = [event.delta for event in manager if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text  # a slow reader gets fewer and longer ones


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "tools": [CLOCK, WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 40,
    }
    asked = client.responses.create(**{**GREEDY, **options, "input": "The weather in Rome?"})
    [call] = asked.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = stream(client, **options, input="The weather in Rome?")
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    kinds = [event.type for event in events if "arguments.delta" not in event.type]
    done = ["response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [*OPENING, "response.output_item.added", *done, "response.completed"]

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    more = {"tools": [WEATHER], "tool_choice": "none"}
    chained = create(client, input=[result], previous_response_id=asked.id, **more)
    question = {"role": "user", "content": "The weather in Rome?"}
    sent = [question, call.model_dump(), result]
    assert create(client, input=sent, **more).output_text == chained.output_text
    reference = {"type": "item_reference", "id": call.id}
    assert create(client, input=[question, reference, result], **more).output_text == (
        chained.output_text
    )
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]}
    allowed["tools"] = [{"type": "function", "name": "clock"}]
    answer = create(client, tools=[CLOCK, WEATHER], tool_choice=allowed, max_output_tokens=40)
    assert {item.name for item in answer.output} == {"clock"}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


def test_structured_output(client: openai.OpenAI) -> None:
    options = {**GREEDY, "max_output_tokens": 40, "input": "Describe a cat."}
    parsed = client.responses.parse(**options, text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    with client.responses.stream(**options, text_format=Animal) as manager:
        assert manager.get_final_response().output_parsed == parsed.output_parsed
    answer = create(client, text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert answer.output_text.startswith("{")
    with pytest.raises(openai.BadRequestError, match=r"text\.format") as caught:
        create(client, text={"format": {"type": "json_schema", "name": "x"}})
    assert caught.value.param == "text.format"


def test_conversations_are_kept_on_demand(client: openai.OpenAI) -> None:
    first = create(client, instructions="You are a pirate.")
    second = create(client, input="And again.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = {"role": "assistant", "content": first.output_text}
    sent = [*HELLO, said, {"role": "user", "content": "And again."}]
    unkept = create(client, input=sent, store=False)
    assert unkept.output_text == second.output_text  # instructions are not carried over
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in items] == [each["content"] for each in sent]
    assert [item.role for item in client.responses.input_items.list(second.id)] == [
        "user",
        "assistant",
        "user",
    ]
    for missing in (unkept.id, "resp_never"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(missing)
        with pytest.raises(openai.NotFoundError) as caught:
            create(client, previous_response_id=missing)
        assert caught.value.code == "previous_response_not_found"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    again = create(client, input="And again.", previous_response_id=second.id)
    assert again.usage.input_tokens > second.usage.input_tokens


def test_what_is_shown_again_can_be_sent(http: Any) -> None:
    """Half a character and numbers that are none, in fields which responses repeat."""
    body = {"model": "smollm2", "max_output_tokens": 2}
    item = {"role": "user", "content": "Hi"}
    odd = '{"input": [%s], "prompt_cache_options": {"a": "\\ud800"}, %s'
    text = odd % (json.dumps(item), json.dumps(body)[1:])
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/responses", content=text, headers=headers)
    assert answer.status_code == 200
    shown = http.get(f"/v1/responses/{answer.json()['id']}")
    assert shown.json()["prompt_cache_options"] == {"a": "\ud800"}
    for number in ("1e999", "NaN"):
        text = f'{{"input": "Hi", "prompt_cache_options": {{"a": {number}}}}}'
        answer = http.post("/v1/responses", content=text, headers=headers)
        assert answer.status_code == 400


def test_another_tenants_response_is_not_there(strict: Any) -> None:
    one, two, three, four = map(strict.openai, ["sk-one", "sk-two", "sk-three", "sk-four"])
    options = {"model": "tiny", "input": "Hi", "max_output_tokens": 2}
    own = one.responses.create(**options)
    assert one.responses.retrieve(own.id).id == own.id
    for look in (
        lambda: two.responses.retrieve(own.id),
        lambda: two.responses.delete(own.id),
        lambda: two.responses.cancel(own.id),
        lambda: list(two.responses.input_items.list(own.id)),
        lambda: two.responses.create(**options, previous_response_id=own.id),
        lambda: two.responses.create(
            **{**options, "input": [{"type": "item_reference", "id": own.output[0].id}]}
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            look()
    shared = three.responses.create(**options)
    assert four.responses.retrieve(shared.id).id == shared.id  # keys of one group are one tenant


def reached(
    client: openai.OpenAI, response_id: str, is_there: Callable[[Response], Any]
) -> Response:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = client.responses.retrieve(response_id)
        if is_there(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"it is still {found.status}")


def ended(client: openai.OpenAI, response_id: str) -> Response:
    return reached(client, response_id, lambda r: r.status not in ("queued", "in_progress"))


ENDLESS = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 4000}


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = create(client, background=True)
    assert begun.status == "queued" and begun.output == []
    found = ended(client, begun.id)
    assert found.output_text == create(client).output_text
    assert client.responses.cancel(begun.id) == found  # it has ended already
    with pytest.raises(openai.BadRequestError, match="store"):
        create(client, background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(create(client).id)


def test_what_runs_in_the_background_can_be_cancelled(client: openai.OpenAI) -> None:
    begun = create(client, background=True, **ENDLESS)
    with pytest.raises(openai.BadRequestError, match="still generated"):
        create(client, previous_response_id=begun.id)
    running = reached(client, begun.id, lambda found: found.output_text)
    assert running.status == running.output[0].status == "in_progress"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled" and cancelled.usage.output_tokens > 0
    assert cancelled.output_text.startswith(running.output_text)
    assert client.responses.retrieve(begun.id) == cancelled
    deleted = create(client, background=True, **ENDLESS)
    client.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


def test_the_stream_of_a_cancelled_response_has_an_end(client: openai.OpenAI) -> None:
    events: list[Any] = []
    options = {**GREEDY, **ENDLESS, "input": "Say hello.", "background": True}
    with client.responses.stream(**options) as begun:
        for event in begun:
            if event.type == "response.output_text.delta" and not events[-1].type.endswith("delta"):
                client.responses.cancel(events[0].response.id)
            events.append(event)
    last = events[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert [event.type for event in events[-4:-1]] == MESSAGE_ENDS
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == last.response.output_text != ""
    later = {"stream": True, "starting_after": last.sequence_number - 1}
    [again] = client.responses.retrieve(last.response.id, **later)
    assert again.model_dump() == last.model_dump()


def test_a_stream_in_the_background_can_be_left_and_joined_again(client: openai.OpenAI) -> None:
    events = []
    with create(client, background=True, stream=True) as begun:
        for event in begun:
            events.append(event)
            if len(events) == 5:
                break
    response_id = events[0].response.id
    assert [event.type for event in events[:2]] == ["response.created", "response.queued"]
    resumed = client.responses.retrieve(response_id, stream=True, starting_after=4)
    events += resumed
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[2].type == "response.in_progress"
    assert events[-1].response == ended(client, response_id)
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again == events
    last = client.responses.retrieve(response_id, stream=True, starting_after=len(events))
    assert list(last) == []
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(create(client).id, stream=True)


def test_logprobs(client: openai.OpenAI) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [message] = create(client, **asked).output
    entries = message.content[0].logprobs
    assert "".join(entry.token for entry in entries) == message.content[0].text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = stream(client, **asked)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [e.token for d in deltas for e in d.logprobs] == [entry.token for entry in entries]
    assert create(client).output[0].content[0].logprobs == []


def test_too_long_input_is_refused_or_cut(quick: Any) -> None:
    client = quick.openai()
    turns = [
        {"role": role, "content": f"{number} " + "word " * 2000}
        for number in range(4)
        for role in ("user", "assistant")
    ]
    options = {"model": "tiny", "input": [*turns, *HELLO], "max_output_tokens": 2}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**options)
    assert caught.value.code == "context_length_exceeded"
    cut = client.responses.create(**options, truncation="auto")
    assert cut.truncation == "auto"
    assert 2000 < cut.usage.input_tokens < 8192
    assert cut.usage.input_tokens + 4000 > 8192  # one turn more would not have fitted


@pytest.mark.parametrize(
    ("options", "says", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search", "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "mcp", "tool_choice"),
        ({"tools": [{**CLOCK, "name": "a b"}]}, "name", "tools"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt"),
        ({"include": ["everything"]}, "everything", "include"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"input": []}, "message", None),
        ({"input": [{"type": "computer_call"}]}, "computer_call", "input"),
    ],
)
def test_errors_name_what_is_wrong(
    client: openai.OpenAI, options: dict[str, Any], says: str, param: str | None
) -> None:
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            create(client, **options, stream=is_stream)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_harmless_fields_are_taken(client: openai.OpenAI) -> None:
    harmless = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "me",
        "user": "me",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
    }
    answer = create(client, **harmless, include=["reasoning.encrypted_content"])
    assert answer.output_text == create(client).output_text
    assert (answer.metadata, answer.safety_identifier) == ({"a": "b"}, "me")
    assert answer.max_tool_calls == 3 and answer.parallel_tool_calls is False
