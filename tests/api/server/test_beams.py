"""`use_beam_search` through the server: all beams come back, best first; what cannot be is said."""

from __future__ import annotations

import openai
import pytest

BEAMS = {"model": "smollm2", "max_tokens": 8, "n": 3}
PROMPT = "Once upon a time, there was a"
HELLO = [{"role": "user", "content": "Say hello."}]


def complete(client, prompt=PROMPT, extra=None, **options):
    body = {"use_beam_search": True, **(extra or {})}
    return client.completions.create(prompt=prompt, extra_body=body, **{**BEAMS, **options})


def test_the_beams_of_each_prompt_best_first(client):
    answer = complete(client, [PROMPT, "2 + 2 ="])
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 6
    assert answer.usage.completion_tokens == 6 * 8
    for beams in (answer.choices[:3], answer.choices[3:]):
        scores = [beam.score for beam in beams]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([beam.cumulative_logprob / 8 for beam in beams])
    again = complete(client, temperature=0, extra={"length_penalty": 1, "early_stopping": False})
    assert [choice.text for choice in again.choices] == texts[:3]


def test_the_best_beam_is_at_least_as_likely_as_the_greedy_answer(client):
    def logprob(text):
        scored = client.completions.create(
            model="smollm2", prompt=PROMPT + text, max_tokens=0, echo=True, logprobs=0
        )
        return sum(scored.choices[0].logprobs.token_logprobs[1:])

    greedy = client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=8, temperature=0)
    best = complete(client, n=6).choices[0]
    assert logprob(best.text) >= logprob(greedy.choices[0].text) - 1e-3


def test_a_chat_and_a_stop_string(client):
    body = {"use_beam_search": True, "early_stopping": True}
    answer = client.chat.completions.create(messages=HELLO, extra_body=body, **BEAMS)
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 3
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert all(choice.score <= 0 for choice in answer.choices)
    word = complete(client).choices[0].text.split()[2]
    stopped = complete(client, stop=[word], extra={"length_penalty": 0.0}).choices
    assert "stop" in [choice.finish_reason for choice in stopped]
    for choice in stopped:
        assert word not in choice.text
        assert (choice.stop_reason == word) == (choice.finish_reason == "stop")


@pytest.mark.parametrize(
    ("options", "extra", "says", "param"),
    [
        ({"stream": True}, {}, "cannot stream", "stream"),
        ({}, {"best_of": 4}, "best_of cannot be combined with use_beam_search", "best_of"),
        ({"logprobs": 1}, {}, "logprobs cannot be combined", "logprobs"),
        ({"temperature": 0.7}, {}, "temperature cannot be combined", "temperature"),
        ({}, {"guided_regex": "a+"}, "structured cannot be combined", "structured"),
        ({}, {"length_penalty": 99.0}, "length_penalty must be a number from -16 to 16", None),
        ({}, {"use_beam_search": False, "length_penalty": 2.0}, "needs use_beam_search", None),
        ({}, {"use_beam_search": False, "early_stopping": True}, "needs use_beam_search", None),
    ],
)
def test_what_beams_cannot_do_is_refused(client, options, extra, says, param):
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        complete(client, extra=extra, **options)
    if param is not None:
        assert caught.value.param == param


def test_neutral_words_without_beams(client):
    body = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    answer = client.completions.create(prompt=PROMPT, extra_body=body, **BEAMS)
    assert len(answer.choices) == 3
