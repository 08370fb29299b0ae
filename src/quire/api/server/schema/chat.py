"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from quire.api.server.errors import bad_request
from quire.api.server.schema.fields import GenerationFields
from quire.api.server.schema.thinking import ThinkingFields
from quire.api.tools.definitions import MAX_TOOLS
from quire.api.tools.legacy import as_tool_choice, as_tools, with_tool_calls
from quire.checks import INT32_MAX
from quire.params import SamplingParams

MAX_MESSAGES = 4096

Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),  # not a complaint for each
]


# `quire.api.tools` reads them.
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_GRAMMAR = {
    "type": "object",
    "properties": {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string"}},
    "required": ["syntax", "definition"],
}
_INPUT_FORMAT = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "grammar"]}, "grammar": _GRAMMAR},
    "required": ["type"],
}
_CUSTOM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": {"type": "string"},
        "format": _INPUT_FORMAT,
    },
    "required": ["name"],
}
_TOOL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
            "required": ["type", "function"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "custom"}, "custom": _CUSTOM},
            "required": ["type", "custom"],
        },
    ]
}
_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NAMED = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: _NAME},
            "required": ["type", kind],
        }
        for kind in ("function", "custom")
    ]
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
Tools = Annotated[
    list[Any], Field(max_length=MAX_TOOLS), WithJsonSchema({"type": "array", "items": _TOOL})
]
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]})
]


Functions = Annotated[
    list[Any], Field(max_length=MAX_TOOLS), WithJsonSchema({"type": "array", "items": _FUNCTION})
]
FunctionCall = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, _NAME]}),
]


class ChatRequest(GenerationFields, ThinkingFields):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "modalities": (["text"],),
        "moderation": (),
        "prompt_cache_options": ({},),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # They change no answer: notes, hints for balancers, tiers of a service that has one.
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: str | None = None  # as `user`
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None  # a hint for balancers; there is one cache here
    prompt_cache_retention: str | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None  # as tools were before they had that name
    function_call: FunctionCall | None = None

    # Beyond OpenAI's.
    add_generation_prompt: bool | None = None  # true by default
    continue_final_message: bool = False
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the text

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true.", param="top_logprobs")
        asked = self.token_limit()
        return self.sampling(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=INT32_MAX if asked is None else asked,  # as far as the model goes
            thinking_token_budget=self.budget_of_thought(),
        )

    @property
    def calls_functions(self) -> bool:
        """Whether calls are written as they were before there were tools."""
        return self.functions is not None

    def tool_fields(self) -> tuple[Any, Any, bool | None]:
        """Tools, which of them to call, and whether several at once."""
        if not self.calls_functions:
            return self.tools, self.tool_choice, self.parallel_tool_calls
        if self.tools is not None:
            raise bad_request("Give tools or functions, not both.", param="functions")
        return as_tools(self.functions), as_tool_choice(self.function_call), False

    def conversation(self) -> list[dict[str, Any]]:
        return with_tool_calls(self.messages)

    def check_ending(self) -> None:
        """What is continued has no place for the beginning of another message."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other; set one.",
                param="continue_final_message",
            )
