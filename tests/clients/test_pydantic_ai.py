"""Pydantic AI, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

BOTH = pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatModel])
SETTINGS: Any = {"temperature": 0, "max_tokens": 40}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@BOTH
def test_whole_and_streamed(model: Any) -> None:
    agent = Agent(model("smollm2"), model_settings={**SETTINGS, "max_tokens": 12})
    whole = agent.run_sync("Say hello.")
    with agent.run_stream_sync("Say hello.") as result:
        parts = list(result.stream_text(delta=True, debounce_by=None))
    assert "".join(parts) == whole.output != ""
    assert whole.usage.output_tokens == 12


@BOTH
@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_structured_output(model: Any, form: Any) -> None:
    agent = Agent(model("smollm2"), output_type=form(Animal), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Describe a cat.").output, Animal)
