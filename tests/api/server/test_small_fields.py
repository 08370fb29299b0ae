"""Fields of chats and completions that clients send, and what becomes of each."""

from __future__ import annotations

import json

import openai
import pytest

HELLO = [{"role": "user", "content": "Say hello."}]
CLOCK = {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def tiny_client(quick) -> openai.OpenAI:
    return quick.openai()


@pytest.fixture(scope="module")
def tiny_http(quick):
    with quick.http() as http:
        yield http


def chat(client, extra=None, **options):
    asked = {"max_tokens": 4, "seed": 1, "messages": HELLO, **options}
    return client.chat.completions.create(model="tiny", extra_body=extra, **asked)


def test_fields_that_change_nothing(tiny_client):
    noted = chat(
        tiny_client,
        metadata={"run": "7"},
        store=True,
        service_tier="flex",
        verbosity="low",
        safety_identifier="me",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "Hello."},
    )
    assert noted.choices == chat(tiny_client).choices


def text_of(http, **body) -> str:
    ids = http.post("/tokenize", json=body).json()["tokens"]
    return http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize("content", ["Once up", [{"type": "text", "text": "Once up"}]])
def test_a_message_that_is_continued(tiny_client, tiny_http, content):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    extra = {"continue_final_message": True}
    text = text_of(tiny_http, messages=messages, **extra)
    assert text.endswith("<|im_start|>assistant\nOnce up")
    answer = chat(tiny_client, {**extra, "return_token_ids": True}, messages=messages)
    ids = tiny_http.post("/tokenize", json={"messages": messages, **extra}).json()["tokens"]
    assert answer.prompt_token_ids == ids
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        chat(tiny_client, {**extra, "add_generation_prompt": True}, messages=messages)


def test_a_prompt_that_is_cut(tiny_client):
    words = "one two three four five six seven eight"
    whole = tiny_client.completions.create(
        model="tiny", prompt=words, max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids = whole.choices[0].prompt_token_ids
    last = " six seven eight"
    for most, kept, shown in ((3, ids[-3:], last), (100, ids, words), (-1, ids, words)):
        extra = {"truncate_prompt_tokens": most, "return_token_ids": True}
        cut = tiny_client.completions.create(
            model="tiny", prompt=words, max_tokens=1, echo=True, extra_body=extra
        )
        assert cut.choices[0].prompt_token_ids == kept
        assert cut.usage.prompt_tokens == len(kept)
        assert cut.choices[0].text.startswith(shown)
    answer = chat(tiny_client, {"truncate_prompt_tokens": 5})
    assert answer.usage.prompt_tokens == 5
    for bad in (0, -2, 10**6):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            chat(tiny_client, {"truncate_prompt_tokens": bad})


def test_a_prompt_longer_than_the_model_fits_when_it_is_cut(tiny_client):
    ids = [5] * 10_000
    extra = {"truncate_prompt_tokens": -1}
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        tiny_client.completions.create(model="tiny", prompt=ids, max_tokens=1)
    answer = tiny_client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, extra_body=extra
    )
    assert answer.usage.completion_tokens == 1


def test_a_suffix_needs_a_model_that_fills_in(tiny_client):
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle"):
        tiny_client.completions.create(model="tiny", prompt="def f():", suffix="return x")
    with pytest.raises(openai.BadRequestError, match="text"):
        tiny_client.completions.create(model="tiny", prompt=[1, 2], suffix="return x")
    assert tiny_client.completions.create(model="tiny", prompt="a", suffix="", max_tokens=1).choices


def test_functions_as_they_were_before_tools(tiny_client):
    options = {"functions": [CLOCK], "function_call": {"name": "clock"}, "max_tokens": 60}
    options["logit_bias"] = {"109": 20.0}  # a brace, which ends the arguments
    [choice] = chat(tiny_client, **options).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "clock"
    assert isinstance(json.loads(choice.message.function_call.arguments), dict)
    parts = [part.choices[0] for part in chat(tiny_client, stream=True, **options)]
    calls = [part.delta.function_call for part in parts if part.delta.function_call]
    assert calls[0].name == "clock" and parts[-1].finish_reason == "function_call"
    joined = "".join(call.arguments or "" for call in calls)
    assert joined == choice.message.function_call.arguments


def test_a_history_with_functions(tiny_client):
    call = {"name": "clock", "arguments": "{}"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "clock", "content": "Ten."},
    ]
    assert chat(tiny_client, messages=messages, functions=[CLOCK]).choices
    with pytest.raises(openai.BadRequestError, match="not both"):
        tool = {"type": "function", "function": CLOCK}
        chat(tiny_client, functions=[CLOCK], tools=[tool])
