"""Structured output as its users meet it, on the demo model."""

from __future__ import annotations

import json
import re
import sys

import pytest
from effort import effort

from quire import LLM, ConfigError, RequestError, SamplingParams, StructuredOutput
from quire.api import cli
from quire.bench.engine.random_schemas import random_schema
from quire.bench.engine.structured import ask_for, is_valid

BOB = [{"role": "user", "content": "Bob is 33 years old and lives in Rome. Describe him as JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


AT_A_TIME = effort(4, 16)


@pytest.fixture(scope="module")
def llm():
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": AT_A_TIME}
    with LLM("smollm2", **settings, use_tqdm=False) as llm:
        yield llm


def test_random_schemas_many_at_a_time(llm):
    pytest.importorskip("jsonschema")
    schemas = [random_schema(seed) for seed in range(effort(6, 24))]
    outputs = ask_for(llm, schemas)
    wrong = [
        (schema, output.outputs[0].text)
        for schema, output in zip(schemas, outputs, strict=True)
        if not is_valid(output, schema)
    ]
    assert not wrong


def test_without_a_judge_no_answer_is_called_invalid(llm, monkeypatch):
    outputs = ask_for(llm, [PERSON])
    monkeypatch.setitem(sys.modules, "jsonschema", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="pip install jsonschema"):
        is_valid(outputs[0], PERSON)


def test_the_answer_comes_through_the_form(llm):
    params = SamplingParams(temperature=0, max_tokens=40, structured={"json_schema": PERSON})
    [output] = llm.chat(BOB, params, use_tqdm=False)
    assert json.loads(output.outputs[0].text) == {"name": "Bob", "age": 33}
    assert output.outputs[0].finish_reason == "stop"


def test_each_prompt_has_a_form_of_its_own_or_none(llm):
    forms = [{"regex": "[A-Z][a-z]{2,5}, [0-9]{2}"}, None, {"choice": ["red", "green"]}]
    params = [
        SamplingParams(temperature=0, max_tokens=12, structured=form, n=2 if form else 1)
        for form in forms
    ]
    outputs = llm.generate(["One:", "Two:", "Three:"], params, use_tqdm=False)
    assert all(re.fullmatch("[A-Z][a-z]{2,5}, [0-9]{2}", o.text) for o in outputs[0].outputs)
    alone = llm.generate("Two:", params[1], use_tqdm=False)[0].outputs[0]
    assert outputs[1].outputs[0].text == alone.text
    assert {o.text for o in outputs[2].outputs} <= {"red", "green"}


def test_a_stream_shows_the_same_text(llm):
    params = SamplingParams(temperature=0, max_tokens=40, structured={"json_schema": PERSON})
    parts = list(llm.stream_chat(BOB, params))
    assert json.loads(parts[-1].outputs[0].text) == {"name": "Bob", "age": 33}
    assert parts[-1].outputs[0].finish_reason == "stop"


def test_logprobs_and_best_of_go_with_it(llm):
    form = StructuredOutput(choice=["yes", "no"])
    params = SamplingParams(n=1, best_of=3, seed=1, logprobs=2, max_tokens=8, structured=form)
    [output] = llm.generate("Is the sea wet?", params, use_tqdm=False)
    best = output.outputs[0]
    assert best.text in ("yes", "no") and len(best.logprobs) == len(best.token_ids)
    assert best.cumulative_logprob == pytest.approx(
        sum(each[i].logprob for each, i in zip(best.logprobs, best.token_ids, strict=True))
    )


def test_a_bad_form_raises_before_anything_starts(llm):
    params = [SamplingParams(), SamplingParams(structured={"regex": "(a"})]
    before = llm.stats()["steps"]
    with pytest.raises(RequestError, match=r"The regex cannot be used \(unclosed group\)"):
        llm.generate(["One", "Two"], params, use_tqdm=False)
    assert llm.stats()["steps"] == before


@pytest.mark.gpu
def test_on_a_gpu_where_steps_overlap():
    pytest.importorskip("jsonschema")
    schemas = [random_schema(seed) for seed in range(64)]
    settings = {"max_num_seqs": 32, "num_blocks": 4096}
    with LLM("smollm2", device="cuda", use_tqdm=False, **settings) as llm:
        outputs = ask_for(llm, schemas)
        assert all(is_valid(o, schema) for o, schema in zip(outputs, schemas, strict=True))
        params = SamplingParams(temperature=0, max_tokens=40, structured={"json_schema": PERSON})
        [output] = llm.chat(BOB, params, use_tqdm=False)
        assert json.loads(output.outputs[0].text) == {"name": "Bob", "age": 33}


def test_from_the_command_line(capsys, monkeypatch, llm):
    monkeypatch.setattr("quire.api.cli.generate.open_llm", lambda args: Borrowed(llm))
    form = json.dumps({"json_schema": PERSON})
    line = ["generate", "--prompt", "Bob, 33:", "--max-tokens", "40", "--structured", form]
    assert cli.main([*line, "--temperature", "0"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"name", "age"}
    assert cli.main(["generate", "--prompt", "x", "--structured", '{"regx": "a"}']) == 2
    assert "did you mean regex?" in capsys.readouterr().err
    assert cli.main(["generate", "--prompt", "x", "--structured", "[0-9]+"]) == 2


class Borrowed:
    """An engine that is there already."""

    def __init__(self, llm):
        self.llm = llm

    def __enter__(self):
        return self.llm

    def __exit__(self, *error):
        pass
