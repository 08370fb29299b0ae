"""`return_token_ids`: the ids behind the text, and all there is of a model without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess
from tiny_model import write_tiny_model

from quire.api import cli

IDS = {"return_token_ids": True}
PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def completion(client, prompt=PROMPT, **options):
    options = {"temperature": 0, "max_tokens": 8, "extra_body": IDS, **options}
    return client.completions.create(model="smollm2", prompt=prompt, **options)


def chat(client, **options):
    options = {"temperature": 0, "max_tokens": 40, "extra_body": IDS, **options}
    return client.chat.completions.create(model="smollm2", messages=HELLO, **options)


def text_of(http, ids: list[int]) -> str:
    return http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_a_completion_has_the_ids_of_its_text(client, http):
    answer = completion(client)
    [choice] = answer.choices
    assert text_of(http, choice.token_ids) == choice.text
    assert text_of(http, choice.prompt_token_ids) == PROMPT
    assert len(choice.token_ids) == answer.usage.completion_tokens
    unasked = completion(client, extra_body={}).choices[0].to_dict()
    assert not unasked.keys() & {"token_ids", "prompt_token_ids"}


def test_a_stream_of_several_choices_has_each_id_once(client):
    prompts = [PROMPT, "One, two, three,"]
    options = {"n": 2, "seed": 3, "temperature": 1.0}
    whole = completion(client, prompts, **options).choices
    ids: dict[int, list[int]] = {choice.index: [] for choice in whole}
    of_prompts: dict[int, list[list[int]]] = {choice.index: [] for choice in whole}
    for part in completion(client, prompts, stream=True, **options):
        [choice] = part.choices
        ids[choice.index] += choice.token_ids
        if "prompt_token_ids" in choice.to_dict():
            of_prompts[choice.index].append(choice.prompt_token_ids)
    assert ids == {choice.index: choice.token_ids for choice in whole}
    assert of_prompts == {choice.index: [choice.prompt_token_ids] for choice in whole}
    assert whole[0].prompt_token_ids == whole[1].prompt_token_ids != whole[2].prompt_token_ids


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "required"}])
def test_a_chat_has_those_of_its_prompt_beside_the_choices(client, http, more):
    whole = chat(client, **more)
    rendered = text_of(http, whole.prompt_token_ids)
    assert "Say hello." in rendered
    ids = whole.choices[0].token_ids
    assert len(ids) == whole.usage.completion_tokens
    parts = [part.to_dict() for part in chat(client, stream=True, **more)]
    assert parts[0]["prompt_token_ids"] == whole.prompt_token_ids
    assert not any("prompt_token_ids" in part for part in parts[1:])
    streamed = [i for part in parts for i in part["choices"][0].get("token_ids", [])]
    assert streamed == ids, "with the token that ended it"


@pytest.fixture(scope="module")
def wordless(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[ServerProcess]:
    """A model without a tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("wordless"), smollm2_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    server = ServerProcess.tiny(str(folder))
    yield server
    assert server.stop() == 0, server.log


def test_without_a_tokenizer_each_step_is_an_event(wordless):
    with wordless.openai() as client:
        options = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, "seed": 1}
        whole = client.completions.create(**options, extra_body=IDS | {"ignore_eos": True})
        assert whole.choices[0].text == "" and len(whole.choices[0].token_ids) == 300
        parts = list(
            client.completions.create(**options, stream=True, extra_body=IDS | {"ignore_eos": True})
        )
    assert [i for part in parts for i in part.choices[0].token_ids] == whole.choices[0].token_ids
    assert all(part.choices[0].token_ids for part in parts)
    # Steps may come together while the client is slow, but never all of them.
    assert len(parts) > 10
    assert parts[0].choices[0].prompt_token_ids == [5, 6, 7]


def test_a_wrong_type_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="return_token_ids"):
        completion(client, extra_body={"return_token_ids": "yes"})


def test_the_benchmark_measures_between_tokens_without_a_tokenizer(wordless, capsys):
    line = ["bench", "serve", "--url", wordless.url, "--processes", "1", "--prompts", "ids"]
    line += ["--rate", "inf", "--num-requests", "2", "--input-len", "20", "--output-len", "50"]
    assert cli.main([*line, "--ignore-eos", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"]["out"] == 100
    assert "between tokens" in [row["ms"] for row in result["rows"]]
