"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.api.server.errors import bad_request
from quire.api.server.schema.fields import GenerationFields
from quire.api.tools.definitions import MAX_TOOLS
from quire.api.tools.legacy import as_tool_choice, as_tools, with_tool_calls
from quire.checks import INT32_MAX
from quire.errors import RequestError
from quire.models.text.chat_template import refuse_reserved
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
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
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
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
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
_NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
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
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, _NAMED["properties"]["function"]]}),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    budget_tokens: int | None = None


class OpenRouterReasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: Effort | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ChatRequest(GenerationFields):
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
    max_completion_tokens: int | None = None
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
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None  # Qwen's
    thinking: Thinking | None = None  # DeepSeek's and Z.ai's
    thinking_token_budget: int | None = None  # vLLM's; -1 is none
    thinking_budget: int | None = None  # Qwen's name for it
    reasoning: OpenRouterReasoning | None = None
    include_reasoning: bool | None = None  # vLLM's and OpenRouter's
    separate_reasoning: bool | None = None  # SGLang's: false leaves thoughts in the text

    def params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise bad_request(
                "Give max_completion_tokens or max_tokens, not both.", param="max_tokens"
            )
        asked = self.max_completion_tokens
        if asked is None:
            asked = self.max_tokens
        return self.sampling(
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=INT32_MAX if asked is None else asked,  # as far as the model goes
            thinking_token_budget=self._thinking_budget(),
        )

    def _thinking_budget(self) -> int | None:
        thinking, reasoning = self.thinking, self.reasoning
        return one_budget(
            {
                "thinking_token_budget": self.thinking_token_budget,
                "thinking_budget": self.thinking_budget,
                "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
                "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
            }
        )

    @property
    def shows_thoughts(self) -> bool:
        excludes = self.reasoning is not None and bool(self.reasoning.exclude)
        return self.include_reasoning is not False and not excludes

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

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, and what other fields say of how much the model shall think."""
        asked: dict[str, Any] = {
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
        }
        if (reasoning := self.reasoning) is not None:
            asked["reasoning_effort"] = self.reasoning_effort or reasoning.effort
            if self.enable_thinking is None:
                asked["enable_thinking"] = reasoning.enabled
        if self.thinking is not None and asked["enable_thinking"] is None:
            asked["enable_thinking"] = self.thinking.type != "disabled"
        named = template_variables(self.chat_template_kwargs)
        return {name: value for name, value in asked.items() if value is not None} | named


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, without what requests have fields for."""
    try:
        refuse_reserved(given or {}, others=("tools",))
    except RequestError as error:
        raise bad_request(str(error), param="chat_template_kwargs") from None
    return given or {}


def one_budget(given: Mapping[str, int | None]) -> int | None:
    """A budget for thinking, by whichever of its names it was given; -1 is none."""
    asked = {name: value for name, value in given.items() if value is not None}
    if len({*asked.values()}) > 1:
        raise bad_request(f"Give one of {' and '.join(asked)}, not both.")
    budget = next(iter(asked.values()), None)
    return None if budget == -1 else budget
