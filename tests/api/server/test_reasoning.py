"""A model that thinks, as OpenAI's client sees it.

Its weights are random: where a thought ends is left to chance, which a bias gives a good one.
"""

from __future__ import annotations

import json

import openai
import pytest

CLOSE = 4  # the id of the tag that ends a thought
ENDS_SOON = {str(CLOSE): 8.5}  # with one token of ten
HELLO = [{"role": "user", "content": "Say hello."}]
OK = {
    "type": "object",
    "properties": {"ok": {"const": True}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "ok", "schema": OK, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def client(thinking) -> openai.OpenAI:
    return thinking.openai()


def ask(client, extra=None, **options):
    asked = {"max_tokens": 200, "seed": 3, "logit_bias": ENDS_SOON, **options}
    return client.chat.completions.create(
        model="tiny", messages=asked.pop("messages", HELLO), extra_body=extra, **asked
    )


@pytest.mark.parametrize("opens", [True, False])
def test_json_behind_a_thought(client, opens):
    """Whether the prompt has opened the thought, or the model may open one."""
    kwargs = {"chat_template_kwargs": {"opens": opens}}
    bias = {"3": 3.0, **ENDS_SOON}  # of the tokens that may come first, the tag
    answer = ask(client, kwargs, response_format=AS_JSON, n=8, logit_bias=bias)
    thoughts = set()
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found["ok"] is True and found["n"] in (1, 2)
        assert choice.message.reasoning == choice.message.reasoning_content
        thoughts.add(choice.message.reasoning)
    assert len(thoughts - {None}) > 1
    details = answer.usage.completion_tokens_details
    assert len(thoughts) - 1 <= details.reasoning_tokens < answer.usage.completion_tokens


def test_a_stream_joins_to_the_whole(client):
    for seed in range(4):
        whole = ask(client, response_format=AS_JSON, seed=seed)
        parts = list(
            ask(
                client,
                response_format=AS_JSON,
                seed=seed,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        deltas = [part.choices[0].delta for part in parts if part.choices]
        message = whole.choices[0].message
        for name in ("reasoning_content", "reasoning", "content"):
            joined = "".join(getattr(delta, name, None) or "" for delta in deltas)
            assert joined == (getattr(message, name) or "")
        assert parts[-1].usage.completion_tokens_details == whole.usage.completion_tokens_details


def test_a_thought_that_is_cut_leaves_no_words(client):
    answer = ask(client, max_tokens=8, logit_bias={str(CLOSE): -100.0})
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content == "" and choice.message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ],
)
def test_a_model_that_shall_not_think(client, extra):
    answer = ask(client, extra, response_format=AS_JSON, logit_bias=None)
    [choice] = answer.choices
    assert json.loads(choice.message.content)["ok"] is True
    assert choice.message.reasoning_content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_template_variables_come_before_other_fields(client):
    extra = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(client, extra, max_tokens=4, logit_bias={str(CLOSE): -100.0})
    assert answer.choices[0].message.reasoning_content


def test_thoughts_that_are_not_wanted(client):
    shown = ask(client, response_format=AS_JSON)
    hidden = ask(client, {"include_reasoning": False}, response_format=AS_JSON)
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.content == shown.choices[0].message.content
    parts = ask(client, {"include_reasoning": False}, response_format=AS_JSON, stream=True)
    assert not any(hasattr(part.choices[0].delta, "reasoning_content") for part in parts)
    raw = ask(client, {"separate_reasoning": False}, response_format=AS_JSON)
    assert raw.choices[0].message.content.endswith(shown.choices[0].message.content)
    assert "</think>" in raw.choices[0].message.content


def test_a_forced_call_behind_a_thought(client):
    choices = ask(
        client, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, n=8
    ).choices
    for choice in choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        assert call.function.name == "clock" and json.loads(call.function.arguments) == {}
    assert any(choice.message.reasoning_content for choice in choices)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_in_the_history_reach_the_template(thinking, name):
    messages = [*HELLO, {"role": "assistant", "content": "Hello.", name: "They greet."}, *HELLO]
    with thinking.http() as http:
        ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "<think>\nThey greet.\n</think>\n\nHello.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def test_a_message_may_have_thoughts_alone(client):
    cut = {"role": "assistant", "content": None, "reasoning_content": "Hm, "}
    assert ask(client, messages=[*HELLO, cut, *HELLO], max_tokens=2).choices


def test_logprobs_cover_every_token(client):
    parts = ask(client, response_format=AS_JSON, logprobs=True, stream=True)
    [*tokens] = [
        each.token
        for part in parts
        if part.choices[0].logprobs is not None
        for each in part.choices[0].logprobs.content
    ]
    assert "</think>" in tokens and "".join(tokens).rstrip().endswith("}")


@pytest.mark.parametrize("effort", ["huge", 3, ""])
def test_an_effort_that_is_none(client, effort):
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        ask(client, {"reasoning_effort": effort})
