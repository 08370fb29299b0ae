"""OpenAI's own client against a real server."""

from __future__ import annotations

import openai
import pytest

PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"model": "smollm2", "temperature": 0}


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-4")


def test_a_completion(client):
    answer = client.completions.create(prompt=PROMPT, max_tokens=4, **GREEDY)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 9
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat(client):
    answer = client.chat.completions.create(messages=HELLO, max_completion_tokens=6, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "Hello" in answer.choices[0].message.content


def test_streams_join_to_the_whole(client):
    whole = client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY).choices[0].text
    parts = client.completions.create(prompt=PROMPT, max_tokens=12, stream=True, **GREEDY)
    texts = [part.choices[0].text for part in parts]
    assert "".join(texts) == whole
    assert len(texts) > 3

    whole = client.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    parts = list(
        client.chat.completions.create(messages=HELLO, max_tokens=8, stream=True, **GREEDY)
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    joined = "".join(part.choices[0].delta.content or "" for part in parts)
    assert joined == whole.choices[0].message.content
    assert all(part.usage is None for part in parts)
