"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from quire.api.server.answers.response_format import read_structured
from quire.api.server.errors import bad_request
from quire.api.server.messages import tools
from quire.api.server.messages.conversation import chat_messages, ends_open
from quire.api.server.schema.chat import MAX_MESSAGES
from quire.api.server.schema.common import CommonFields
from quire.api.server.schema.thinking import template_variables
from quire.api.tools.definitions import MAX_TOOLS
from quire.params import SamplingParams
from quire.structured import StructuredOutput

# `quire.api.server.messages` reads what is in them.
_TEXT = {"type": "string"}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_TEXT_BLOCKS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}
_BLOCK = {
    "anyOf": [
        _TEXT_BLOCK,
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_use"},
                "id": _TEXT,
                "name": _TEXT,
                "input": {"type": "object"},
            },
            "required": ["type", "id", "name", "input"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_result"},
                "tool_use_id": _TEXT,
                "content": _TEXT_BLOCKS,
                "is_error": {"type": "boolean"},
            },
            "required": ["type", "tool_use_id"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "thinking"},
                "thinking": _TEXT,
                "signature": _TEXT,
            },
            "required": ["type", "thinking"],
        },
    ]
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]},
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": _TEXT,
        "input_schema": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name", "input_schema"],
}

Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
]
System = Annotated[Any, WithJsonSchema(_TEXT_BLOCKS)]
Tools = Annotated[
    list[Any], Field(max_length=MAX_TOOLS), WithJsonSchema({"type": "array", "items": _TOOL})
]
ToolChoice = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": _TEXT,
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "required": ["type"],
        }
    ),
]
Thinking = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": {"type": "integer", "minimum": 1},
                "display": {"enum": ["summarized", "omitted"]},
            },
            "required": ["type"],
        }
    ),
]
OutputFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        }
    ),
]
Texts = Annotated[Any, WithJsonSchema({"type": "array", "items": _TEXT})]

# Whether a template is told to think; where the model decides, it is told nothing.
THINKS = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class CountTokensRequest(CommonFields):
    """A prompt: what a request that counts tokens shares with one that generates."""

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "compaction": (),
        "container": (),
        "mcp_servers": ([],),
        "n": (1,),
        "logprobs": (False,),
        "stop": ([], ""),
        # Other APIs' names for `thinking` and `output_config.effort`.
        "enable_thinking": (),
        "include_reasoning": (True,),
        "reasoning": (),
        "reasoning_effort": (),
        "separate_reasoning": (True,),
        "thinking_budget": (),
        "thinking_token_budget": (-1,),
    }

    messages: Messages
    system: System | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    # The cache keeps every prompt, marked or not.
    cache_control: dict[str, Any] | None = None
    # No edit is made to what a request sends.
    context_management: dict[str, Any] | None = None

    # Beyond Anthropic's.
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.thread is not None:
            # By this code Anthropic's client knows to send whole conversations from here on.
            raise bad_request(
                "thread is not supported by this server; send the whole conversation.",
                code="thread_unsupported_request",
            )

    def conversation(self) -> list[dict[str, Any]]:
        return chat_messages(self.system, self.messages)

    @property
    def is_continued(self) -> bool:
        return ends_open(self.messages)

    def functions(self) -> tuple[list[dict[str, Any]], Any, bool]:
        """The tools, which of them are to be called, and whether several may be."""
        return (tools.functions(self.tools), *tools.choice(self.tool_choice))

    @property
    def shows_thoughts(self) -> bool:
        return (self.thinking or {}).get("display") != "omitted"

    def template_variables(self) -> dict[str, Any]:
        return {
            **self._thinking(),
            **self._effort(),
            **template_variables(self.chat_template_kwargs),
        }

    def _thinking(self) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKS:
            raise bad_request("thinking must have the type 'enabled', 'disabled' or 'adaptive'.")
        self._thinking_budget()
        return {} if THINKS[kind] is None else {"enable_thinking": THINKS[kind]}

    def _thinking_budget(self) -> int | None:
        thinking = self.thinking or {}
        budget = thinking.get("budget_tokens")
        if thinking.get("type") != "enabled" and budget is None:
            return None
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise bad_request("thinking needs budget_tokens, which is a number of tokens.")
        return budget

    def _effort(self) -> dict[str, Any]:
        effort = (self.output_config or {}).get("effort")
        if effort is None:
            return {}
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise bad_request(f"output_config.effort must be one of {', '.join(EFFORTS)}.")
        return {"reasoning_effort": EFFORTS[effort]}


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: Texts | None = None
    output_format: OutputFormat | None = None  # as it was called before it was in output_config
    # They change nothing here.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: str | None = None

    def params(self) -> SamplingParams:
        if self.max_tokens < 1:
            raise bad_request("max_tokens must be at least 1.", param="max_tokens")
        return self.sampling(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            structured=self._structured(),
            thinking_token_budget=self._thinking_budget(),
        )

    def _structured(self) -> StructuredOutput | None:
        asked = (self.output_config or {}).get("format") or self.output_format
        if asked is None:
            return None
        if not isinstance(asked, Mapping) or asked.get("type") != "json_schema":
            raise bad_request("output_config.format must have the type 'json_schema' and a schema.")
        described = {"schema": asked.get("schema"), "strict": True}
        return read_structured(
            {"response_format": {"type": "json_schema", "json_schema": described}}
        )
