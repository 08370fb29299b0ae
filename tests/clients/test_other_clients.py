"""Clients that have one way to ask: Instructor, LLM, smolagents and Outlines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import instructor
import llm
import openai
import outlines
import pytest
from pydantic import BaseModel
from smolagents import OpenAIModel, tool

HELLO = [{"role": "user", "content": "Describe a cat."}]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@pytest.mark.parametrize(
    "mode",
    [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS],
)
def test_instructor(mode: Any) -> None:
    client = instructor.from_openai(openai.OpenAI(), mode=mode)
    limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    options: dict[str, Any] = {limit: 200, "temperature": 0}
    animal = client.create(model="smollm2", messages=HELLO, response_model=Animal, **options)
    assert isinstance(animal, Animal)


def test_llm(url: str, tmp_path: Path) -> None:
    settings = f"- model_id: quire\n  model_name: smollm2\n  api_base: {url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    model = llm.get_model("quire")
    options = {"temperature": 0, "max_tokens": 8}
    whole = model.prompt("Say hello.", stream=False, **options).text()
    assert "".join(model.prompt("Say hello.", **options)) == whole != ""


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    return "It rains."


def test_smolagents() -> None:
    model = OpenAIModel("smollm2", temperature=0, max_tokens=60)
    said = model.generate([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}])
    assert said.content
    called = model.generate(HELLO, tools_to_call_from=[weather])
    assert {call.function.name for call in called.tool_calls} == {"weather"}


def test_outlines() -> None:
    model = outlines.from_openai(openai.OpenAI(), "smollm2")
    text = model("Describe a cat.", Animal, max_tokens=40, temperature=0)
    assert Animal.model_validate_json(text)
