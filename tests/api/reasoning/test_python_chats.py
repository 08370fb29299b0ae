"""`LLM.chat` with a model that thinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import write_thinking_model

from quire import LLM, SamplingParams

HELLO = [{"role": "user", "content": "Say hello."}]
OK = {
    "type": "object",
    "properties": {"ok": {"const": True}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory, smollm2_path: Path):
    folder = write_thinking_model(tmp_path_factory.mktemp("thinking"), smollm2_path)
    settings = {"load_format": "dummy", "num_blocks": 64, "device": "cpu", "dtype": "float32"}
    with LLM(str(folder), use_tqdm=False, **settings) as llm:
        yield llm


def params(**options):
    return SamplingParams(max_tokens=200, seed=5, logit_bias={4: 8.5}, **options)


def test_a_form_begins_behind_the_thought(llm):
    asked = params(structured={"json_schema": OK}, n=8)
    [output] = llm.chat(HELLO, asked, use_tqdm=False)
    assert all(json.loads(answer.text) == {"ok": True} for answer in output.outputs)
    assert any(answer.reasoning for answer in output.outputs)
    [silent] = llm.chat(
        HELLO, asked, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert json.loads(silent.outputs[0].text) == {"ok": True}
    assert silent.outputs[0].reasoning is None
    assert asked.structured.preamble is None  # the caller's stays as it is


def test_each_chat_has_its_own_parameters(llm):
    forms = [params(structured={"choice": [word]}) for word in ("one", "two")]
    outputs = llm.chat([HELLO, HELLO], forms, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["one", "two"]


def test_a_stream_has_all_that_is_written(llm):
    for output in llm.stream_chat(HELLO, params(structured={"choice": ["yes"]})):
        last = output
    thought, tag, words = last.outputs[0].text.partition("</think>")
    assert tag and words.strip() == "yes"
    llm.thinking_chat(last.prompt_token_ids).read(last)
    assert last.outputs[0].text == "yes"
    assert (last.outputs[0].reasoning or "") == thought.strip()
