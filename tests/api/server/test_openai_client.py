"""OpenAI's own client against a real server."""

from __future__ import annotations

import math

import openai
import pytest

PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"model": "smollm2", "temperature": 0}


def completion(client, prompt=PROMPT, **options):
    return client.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": 4, **options})


def chat(client, **options):
    return client.chat.completions.create(messages=HELLO, **{**GREEDY, "max_tokens": 6, **options})


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="not served here") as caught:
        completion(client, model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_completion(client):
    answer = completion(client)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 9
    assert answer.id == f"cmpl-{answer._request_id}"


def test_a_chat(client):
    answer = client.chat.completions.create(messages=HELLO, max_completion_tokens=6, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "Hello" in answer.choices[0].message.content


def test_streams_join_to_the_whole(client):
    whole = completion(client, max_tokens=12).choices[0].text
    texts = [part.choices[0].text for part in completion(client, max_tokens=12, stream=True)]
    assert "".join(texts) == whole
    assert len(texts) > 3

    whole = chat(client).choices[0]
    parts = list(chat(client, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == whole.finish_reason
    joined = "".join(part.choices[0].delta.content or "" for part in parts)
    assert joined == whole.message.content
    assert all(part.usage is None and part.choices for part in parts)


def test_usage_is_one_last_chunk_and_only_when_asked_for(client):
    for create in (completion, chat):
        whole = create(client).usage
        parts = list(create(client, stream=True, stream_options={"include_usage": True}))
        *others, last = parts
        assert last.choices == []
        assert all(part.choices and part.usage is None for part in others)
        assert last.usage.completion_tokens == whole.completion_tokens
        assert last.usage.prompt_tokens_details.cached_tokens is not None


def test_cached_tokens_are_told_with_their_tier(client):
    prompt = "A prompt of many words that two requests have in common. " * 8
    first = completion(client, prompt).usage
    second = completion(client, prompt).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert 0 < cached < second.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens_by_tier == {"device": cached}
    salted = completion(client, prompt, extra_body={"cache_salt": "mine"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_samples_and_prompts_are_numbered_in_order(client):
    prompts = [PROMPT, "One, two, three,"]
    options = {"n": 2, "seed": 7, "temperature": 1.0}
    answer = completion(client, prompts, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].text != answer.choices[1].text
    texts = dict.fromkeys(range(4), "")
    for part in completion(client, prompts, stream=True, **options):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == {choice.index: choice.text for choice in answer.choices}
    alone = completion(client, prompts[1], **options)
    assert [choice.text for choice in alone.choices] == [c.text for c in answer.choices[2:]]


def test_token_ids_and_text_are_the_same_prompt(client, http):
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    expected = completion(client).choices[0].text
    assert completion(client, ids).choices[0].text == expected
    both = completion(client, [ids, ids]).choices
    assert [choice.text for choice in both] == [expected, expected]


def test_stop_strings_end_the_text_and_are_no_part_of_it(client):
    whole = completion(client, max_tokens=12).choices[0].text
    stop = whole[6:9]
    for options in ({"stop": stop}, {"stop": ["never met", stop]}):
        choice = completion(client, max_tokens=12, **options).choices[0]
        assert choice.text == whole[: whole.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        parts = list(completion(client, max_tokens=12, stream=True, **options))
        assert "".join(part.choices[0].text for part in parts) == choice.text
    kept = completion(
        client, max_tokens=12, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == whole[: whole.index(stop)] + stop


def test_sampling_fields_reach_the_sampler(client, http):
    [paris] = http.post("/tokenize", json={"prompt": " Paris"}).json()["tokens"]
    banned = completion(client, max_tokens=1, logit_bias={str(paris): -100}).choices[0].text
    assert banned != " Paris"
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        choice = completion(client, max_tokens=1, temperature=2.0, extra_body=extra).choices[0]
        assert choice.text == " Paris"
    stopped = completion(client, max_tokens=3, extra_body={"stop_token_ids": [paris]}).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", paris)
    extra = {"stop_token_ids": [paris], "min_tokens": 2}
    assert completion(client, max_tokens=3, extra_body=extra).usage.completion_tokens == 3
    twice = completion(client, max_tokens=8, frequency_penalty=2.0).choices[0].text
    assert twice != completion(client, max_tokens=8).choices[0].text
    best = completion(client, n=1, temperature=1.0, seed=3, extra_body={"best_of": 4})
    assert len(best.choices) == 1


def test_logprobs_of_a_chat(client):
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
    parts = chat(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        e for part in parts if part.choices[0].logprobs for e in part.choices[0].logprobs.content
    ]
    assert [e.token for e in streamed] == [e.token for e in content]
    plain = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)


def test_the_end_of_a_message_is_no_part_of_its_logprobs(client):
    choice = chat(client, max_tokens=40, logprobs=True).choices[0]
    assert choice.finish_reason == "stop"
    tokens = [entry.token for entry in choice.logprobs.content]
    assert "".join(tokens) == choice.message.content


def test_echo_with_logprobs(client, http):
    plain = completion(client)
    answer = completion(client, echo=True, logprobs=2)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == PROMPT + plain.choices[0].text
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    for token, logprob, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3  # the two best, and the token itself if it is another
    assert answer.usage.completion_tokens == 4

    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    parts = list(completion(client, ids, echo=True, logprobs=2, stream=True))
    assert "".join(part.choices[0].text for part in parts) == choice.text
    offsets = [offset for part in parts for offset in part.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_echo_of_nothing_but_the_prompt_is_the_same_cold_and_warm(client):
    prompt = "Prompt logprobs are computed anew although all of this is cached by now. " * 3
    cold, warm = (completion(client, prompt, echo=True, logprobs=1, max_tokens=0) for _ in "12")
    assert cold.choices[0].text == prompt
    assert cold.usage.completion_tokens == 0
    assert len(cold.choices[0].logprobs.tokens) == cold.usage.prompt_tokens
    for one, other in zip(
        cold.choices[0].logprobs.token_logprobs[1:],
        warm.choices[0].logprobs.token_logprobs[1:],
        strict=True,
    ):
        assert math.isclose(one, other, abs_tol=1e-4)
    assert completion(client, echo=True, max_tokens=0).choices[0].text == PROMPT


def test_prompt_logprobs_beyond_openais(client):
    echoed = completion(client, echo=True, logprobs=1).choices[0].logprobs.token_logprobs[1:5]
    for answer in (completion(client, extra_body={"prompt_logprobs": 1}),):
        first, *others = answer.choices[0].prompt_logprobs
        assert first is None
        own = [next(iter(entry.values()))["logprob"] for entry in others]
        assert own == pytest.approx(echoed, abs=1e-4)


def test_half_characters_are_named_by_their_bytes(client, http):
    ids = http.post("/tokenize", json={"prompt": "😀"}).json()["tokens"]
    assert len(ids) > 1
    answer = completion(client, ids, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert answer.text == "😀"
    assert all(token.startswith("bytes:\\x") for token in answer.logprobs.tokens)
    assert set(answer.logprobs.text_offset) == {0}


def test_words(http):
    said = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert "".join(said["token_strs"]) == PROMPT
    assert said["count"] == len(said["tokens"])
    assert http.post("/detokenize", json={"tokens": said["tokens"]}).json()["prompt"] == PROMPT
    chat_ids = http.post("/v1/tokenize", json={"messages": HELLO}).json()["tokens"]
    text = http.post("/v1/detokenize", json={"tokens": chat_ids}).json()["prompt"]
    assert text.endswith("Say hello.<|im_end|>\n<|im_start|>assistant\n")


def test_health(http):
    for path in ("/health", "/ready", "/version", "/v1/health", "/models", "/v1/models"):
        assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("options", "says", "param"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 100", "temperature"),
        ({"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        ({"extra_body": {"n": "2"}}, "valid integer", "n"),
        ({"extra_body": {"suffix": "end"}}, "suffix needs a model", "suffix"),
        ({"extra_body": {"priority": 3}}, "scheduling_policy", "priority"),
        ({"prompt": []}, "not be empty", "prompt"),
        ({"prompt": ""}, "prompt is empty", None),
        ({"prompt": [[1], [10**9]]}, "outside the model's vocabulary", None),
        ({"prompt": "word " * 20_000}, "shorten it", None),
        ({"stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais_and_come_before_a_stream_begins(client, options, says, param, stream):
    if stream and "stream_options" in options:
        return
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        completion(client, **options, stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert (caught.value.code == "context_length_exceeded") == (says == "shorten it")


def test_both_names_of_the_limit_may_say_the_same(client):
    both = {"max_completion_tokens": 2, "max_tokens": 2}
    chat = client.chat.completions.create(messages=HELLO, **both, **GREEDY)
    assert chat.usage.completion_tokens == 2
    extra = {"max_completion_tokens": 2}
    assert completion(client, max_tokens=2, extra_body=extra).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="not both"):
        completion(client, max_tokens=3, extra_body=extra)


def test_errors_of_a_chat(client):
    for options, says in [
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"max_completion_tokens": 3}, "not both"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content part"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "needs a name"),
    ]:
        body = {"messages": HELLO, "max_tokens": 2, **GREEDY, **options}
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(**body)
