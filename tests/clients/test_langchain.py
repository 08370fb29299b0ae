"""LangChain's ChatOpenAI, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

BOTH = pytest.mark.parametrize("responses", [True, False])


def model(responses: bool, **options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 40, **options}
    return ChatOpenAI(model="smollm2", use_responses_api=responses, **options)


@BOTH
def test_whole_and_streamed(responses: bool) -> None:
    asked = model(responses, max_tokens=12)
    whole = asked.invoke("Say hello.")
    parts = list(asked.stream("Say hello."))
    assert "".join(part.text for part in parts) == whole.text != ""
    assert whole.usage_metadata["output_tokens"] == 12


@BOTH
def test_a_conversation_that_is_too_long_is_known_as_such(responses: bool) -> None:
    with pytest.raises(ContextOverflowError):
        model(responses).invoke("far " * 9000)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "It rains."


@BOTH
def test_a_tool_and_its_result(responses: bool) -> None:
    asked = model(responses)
    question = HumanMessage("The weather in Rome?")
    called = asked.bind_tools([weather], tool_choice="weather").invoke([question])
    [call] = called.tool_calls
    assert call["name"] == "weather" and set(call["args"]) == {"city"}
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert asked.bind_tools([weather]).invoke([question, called, result]).text


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@BOTH
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(responses: bool, method: str) -> None:
    asked = model(responses).with_structured_output(Animal, method=method)
    assert isinstance(asked.invoke("Describe a cat."), Animal)


def test_a_conversation_goes_on_by_its_response() -> None:
    asked = model(True, use_previous_response_id=True, max_tokens=8)
    history: list[Any] = [HumanMessage("My name is Ann.")]
    history.append(asked.invoke(history))
    history.append(HumanMessage("My name?"))
    second = asked.invoke(history)
    whole = model(True, max_tokens=8).invoke(history)
    assert second.text == whole.text
