"""Requests as other clients send them, recorded from LangChain, LiteLLM and lm-eval."""

from __future__ import annotations

import json

import pytest

USER = {"role": "user", "content": "Hi"}
HI = [{"content": "Hi", "role": "user"}]

LANGCHAIN_CHAT = {
    "messages": [{"content": "You answer briefly.", "role": "system"}, *HI],
    "model": "smollm2",
    "stop": ["\nObservation:", "\n\tObservation:"],
    "stream": False,
    "temperature": 0.0,
}
LANGCHAIN_TEXT = {
    "model": "smollm2",
    "prompt": ["Question: hi\nThought:"],
    "frequency_penalty": 0,
    "logprobs": None,
    "max_tokens": 16,
    "n": 1,
    "presence_penalty": 0,
    "seed": None,
    "stop": ["\nObservation:"],
    "temperature": 0.0,
    "top_p": 1,
}
LITELLM_CHAT = {
    "messages": [USER],
    "model": "smollm2",
    "max_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
}
LITELLM_VLLM = {
    "model": "smollm2",
    "messages": [USER],
    "temperature": 0.5,
    "max_tokens": 8,
    "top_k": 3,
}
LITELLM_TEXT = {
    "model": "smollm2",
    "prompt": ["Hi", "Ho"],
    "logprobs": 2,
    "max_tokens": 8,
    "echo": True,
}
LM_EVAL = {
    "model": "smollm2",
    "prompt": [[504, 3575, 282, 4649, 314], [4093, 28, 827]],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_langchains_chat(http):
    answer = http.post("/v1/chat/completions", json={**LANGCHAIN_CHAT, "max_tokens": 8}).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert set(answer["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_langchains_stop_strings_are_cut_off(http):
    whole = http.post("/v1/completions", json=LANGCHAIN_TEXT).json()["choices"][0]["text"]
    stop = whole[9:13]
    body = {**LANGCHAIN_TEXT, "stop": [*LANGCHAIN_TEXT["stop"], stop]}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        parts = events(response)
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]


def test_litellms_stream_has_its_usage_last_and_no_null_in_it(http):
    with http.stream("POST", "/v1/chat/completions", json=LITELLM_CHAT) as response:
        *parts, last = events(response)
    assert all(len(part["choices"]) == 1 and part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_litellms_vllm_flavour(http):
    answer = http.post("/v1/chat/completions", json=LITELLM_VLLM)
    assert answer.status_code == 200


def test_litellms_completions(http):
    choices = http.post("/v1/completions", json=LITELLM_TEXT).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["text"].startswith("Hi")
    assert choices[1]["text"].startswith("Ho")


def test_lm_evals_likelihoods(http):
    choices = http.post("/v1/completions", json=LM_EVAL).json()["choices"]
    for choice, prompt in zip(choices, LM_EVAL["prompt"], strict=True):
        logprobs = choice["logprobs"]
        # It takes what stands between the context and the one token that is drawn.
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(top and max(top.values()) <= 0 for top in logprobs["top_logprobs"][1:])
        assert logprobs["token_logprobs"][1:] == [
            top[token]
            for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
        ]


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_lm_evals_tokenizer(http, path):
    info = http.get(path).json()
    assert info["eos_token"] == "<|im_end|>"
    assert "messages" in info["chat_template"]
    assert (
        http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"]
        == []
    )
