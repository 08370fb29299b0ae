"""OpenAI's Agents SDK: a tool is called, its result read, and an answer given, over both APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

SILENT = RunConfig(tracing_disabled=True)
MODELS = [OpenAIResponsesModel, OpenAIChatCompletionsModel]
asked: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "It rains."


def agent(model: Any, **options: Any) -> Agent:
    return Agent(
        name="Helper",
        instructions="Use the tool, then answer.",
        model=model("smollm2", AsyncOpenAI()),
        **options,
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_is_called_and_its_result_read(model: Any) -> None:
    asked.clear()
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0)
    helper = agent(model, tools=[weather], model_settings=settings)
    result = asyncio.run(Runner.run(helper, "The weather in Rome?", run_config=SILENT))
    assert len(asked) == 1
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.final_output


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_is_the_same_answer(model: Any) -> None:
    helper = agent(model, model_settings=ModelSettings(temperature=0))

    async def streamed() -> tuple[str, str]:
        result = Runner.run_streamed(helper, "Say hello.", run_config=SILENT)
        events = [event async for event in result.stream_events()]
        deltas = [e.data.delta for e in events if e.type == "raw_response_event" and _is_text(e)]
        return "".join(deltas), result.final_output

    joined, final = asyncio.run(streamed())
    whole = asyncio.run(Runner.run(helper, "Say hello.", run_config=SILENT))
    assert joined == final == whole.final_output != ""


def _is_text(event: Any) -> bool:
    return event.data.type == "response.output_text.delta"


def test_a_conversation_goes_on_by_its_response() -> None:
    helper = agent(OpenAIResponsesModel, model_settings=ModelSettings(temperature=0))
    first = asyncio.run(Runner.run(helper, "Say hello.", run_config=SILENT))
    last = first.last_response_id
    again = Runner.run(helper, "And again.", previous_response_id=last, run_config=SILENT)
    second = asyncio.run(again)
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens
