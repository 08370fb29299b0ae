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


BUDGETS = [
    {"thinking_token_budget": 9},
    {"thinking_budget": 9},
    {"thinking": {"type": "enabled", "budget_tokens": 9}},
    {"reasoning": {"max_tokens": 9}},
    {"reasoning": {"max_tokens": 9, "effort": "low"}, "thinking_token_budget": 9},
]


@pytest.mark.parametrize("extra", BUDGETS, ids=str)
def test_a_budget_ends_the_thought(client, extra):
    """The model would go on for ever: no bias helps it to an end."""
    asked = {"return_token_ids": True, "ignore_eos": True, **extra}
    answer = ask(client, asked, max_tokens=30, logit_bias={}, n=2)
    for choice in answer.choices:
        assert choice.token_ids.index(CLOSE) == 9 and len(choice.token_ids) == 30
        assert choice.message.reasoning and choice.message.content


def test_a_budget_with_a_form_and_with_a_call(client):
    extra = {"thinking_token_budget": 5}
    answer = ask(client, extra, logit_bias={}, response_format=AS_JSON)
    assert json.loads(answer.choices[0].message.content)["ok"] is True
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6  # and the tag
    answer = ask(client, extra, logit_bias={}, tools=[CLOCK], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "clock"


def test_a_budget_that_means_nothing(client):
    """None, one that is not used up, and one of a chat that does not think."""
    usual = ask(client, max_tokens=30)
    for extra in ({"thinking_token_budget": -1}, {"thinking_token_budget": 500}):
        assert ask(client, extra, max_tokens=30).choices == usual.choices
    extra = {"enable_thinking": False, "thinking_token_budget": 0}
    assert ask(client, extra, max_tokens=30).choices[0].message.reasoning is None


def test_budgets_that_are_refused(client):
    for extra, says in [
        ({"thinking_token_budget": -2}, "thinking_token_budget must be"),
        ({"thinking_token_budget": 4, "thinking_budget": 5}, "not both"),
        ({"max_thinking_tokens": 5}, "use a chat with thinking_token_budget"),
        ({"thinking_token_budget": 5, "use_beam_search": True}, "cannot be combined"),
    ]:
        with pytest.raises(openai.BadRequestError, match=says):
            ask(client, extra, logit_bias={}, seed=None)
    with pytest.raises(openai.BadRequestError, match="not supported"):
        extra = {"thinking_token_budget": 5}
        client.completions.create(model="tiny", prompt="Hello", extra_body=extra)


def test_budgets_of_the_other_apis(client, thinking):
    body = {"model": "tiny", "ignore_eos": True, "max_tokens": 20}
    with thinking.http() as http:
        asked = {"thinking": {"type": "enabled", "budget_tokens": 5}, "messages": HELLO}
        answer = http.post("/v1/messages", json=body | asked).raise_for_status().json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        for bad in (None, 0, "5", True):
            asked["thinking"]["budget_tokens"] = bad
            refused = http.post("/v1/messages", json=body | asked)
            assert refused.status_code == 400 and "budget_tokens" in refused.text
    response = client.responses.create(
        model="tiny",
        input="Say hello.",
        max_output_tokens=20,
        extra_body={"thinking_token_budget": 5, "ignore_eos": True},
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 6
    again = client.responses.create(
        model="tiny",
        input="Say hello.",
        max_output_tokens=20,
        extra_body={"reasoning": {"max_tokens": 5}, "thinking_token_budget": 5, "ignore_eos": True},
    )
    assert [item.type for item in again.output] == ["reasoning", "message"]


def respond(client, **extra):
    body = {"ignore_eos": True, "seed": 3, "thinking_token_budget": 5, **extra}
    response = client.responses.create(
        model="tiny", input="Say hello.", max_output_tokens=20, extra_body=body
    )
    return response, [item.type for item in response.output]


@pytest.mark.parametrize(
    "extra",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
    ],
    ids=str,
)
def test_a_response_without_thinking(client, extra):
    response, items = respond(client, **extra)
    assert items == ["message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("extra", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}])
def test_a_response_that_hides_its_thoughts(client, extra):
    shown, items = respond(client)
    assert items == ["reasoning", "message"]
    hidden, items = respond(client, **extra)
    assert items == ["message"] and hidden.output_text == shown.output_text
    assert hidden.usage.output_tokens_details.reasoning_tokens == 6
    events = client.responses.create(
        model="tiny", input="Hello.", max_output_tokens=8, stream=True, extra_body=extra
    )
    assert not any("reasoning" in event.type for event in events)


@pytest.mark.parametrize(
    "extra", [{"thinking_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}}]
)
def test_budgets_of_a_response_by_other_names(client, extra):
    response, items = respond(client, thinking_token_budget=None, **extra)
    assert items == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 6


def test_what_the_other_apis_have_no_way_to_do(client, thinking):
    with pytest.raises(openai.BadRequestError, match="separate_reasoning is not supported"):
        respond(client, separate_reasoning=False)
    with thinking.http() as http:
        for extra in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            body = {"messages": HELLO, "max_tokens": 2, **extra}
            refused = http.post("/v1/messages", json=body)
            assert refused.status_code == 400 and "is not supported" in refused.text


def test_openrouters_reasoning(client):
    def message(**reasoning):
        extra = {"reasoning": reasoning, "ignore_eos": True}
        return ask(client, extra, logit_bias={}, max_tokens=20).choices[0].message

    shown = message(enabled=True, max_tokens=9)
    assert shown.reasoning
    hidden = message(exclude=True, max_tokens=9)
    assert getattr(hidden, "reasoning", None) is None and hidden.content == shown.content
    for off in ({"enabled": False}, {"effort": "none"}):
        assert message(**off).reasoning is None
