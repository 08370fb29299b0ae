"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.api.server.answers.response_format import read_field
from quire.api.server.errors import bad_request
from quire.api.server.schema.fields import StreamOptions, Texts
from quire.api.server.schema.thinking import Reasoning, ThinkingFields
from quire.api.tools.definitions import MAX_TOOLS
from quire.checks import INT32_MAX
from quire.params import SamplingParams

LOGPROBS = "message.output_text.logprobs"
# What `include` may ask for besides: thoughts are never encrypted, the others are of tools that
# are not here.
INCLUDABLE = {
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}

# `quire.api.server.responses` reads items and tools; this is how the API's document shows them.
_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}


def _item(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    properties["type"] = {"const": kind}
    return {"type": "object", "properties": properties, "required": required}


_ROLES = {"enum": ["user", "assistant", "system", "developer"]}
_ITEM = {
    "anyOf": [
        _item("message", ["role", "content"], role=_ROLES, content=_CONTENT),
        _item(
            "function_call",
            ["type", "call_id", "name", "arguments"],
            call_id=_TEXT,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _item(
            "function_call_output",
            ["type", "call_id", "output"],
            call_id=_TEXT,
            output=_CONTENT,
        ),
        _item(
            "custom_tool_call",
            ["type", "call_id", "name", "input"],
            call_id=_TEXT,
            name=_TEXT,
            input=_TEXT,
        ),
        _item(
            "custom_tool_call_output",
            ["type", "call_id", "output"],
            call_id=_TEXT,
            output=_CONTENT,
        ),
        _item("reasoning", ["type"], summary={"type": "array"}, content={"type": "array"}),
        _item("item_reference", ["type", "id"], id=_TEXT),
    ]
}
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
}
_CUSTOM = {
    "type": "object",
    "properties": {
        "type": {"const": "custom"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": _TEXT,
        "format": {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "grammar"]},
                "syntax": {"enum": ["lark", "regex"]},
                "definition": _TEXT,
            },
            "required": ["type"],
        },
    },
    "required": ["type", "name"],
}
_NAMESPACE = {
    "type": "object",
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,63}$"},
        "description": _TEXT,
        "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}},
    },
    "required": ["type", "name", "tools"],
}
_TOOL = {"anyOf": [_FUNCTION, _CUSTOM, _NAMESPACE]}
_NAMED = {
    "type": "object",
    "properties": {"type": {"enum": ["function", "custom"]}, "name": _TEXT},
    "required": ["type", "name"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED},
    },
    "required": ["type", "mode", "tools"],
}
Input = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _ITEM}]})]
Tools = Annotated[
    list[Any], Field(max_length=MAX_TOOLS), WithJsonSchema({"type": "array", "items": _TOOL})
]
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]})
]
Format = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "name": _TEXT,
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["type"],
        }
    ),
]


class SummarizedReasoning(Reasoning):
    summary: str | None = None
    generate_summary: str | None = None  # the older name


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(ThinkingFields):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "separate_reasoning": (True,),  # thoughts are items of their own
    }

    input: Input | None = None
    instructions: Input | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: SummarizedReasoning | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Taken, and shown in the answer; no answer depends on them.
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None  # of tools that the server runs; there are none
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # a hint for balancers; there is one cache here
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    # Beyond OpenAI's.
    stop: Texts | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_summary(self) -> bool:
        asked = self.reasoning
        return asked is not None and bool(asked.summary or asked.generate_summary)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens is not None:
            raise bad_request(
                "max_tokens has another name here; use max_output_tokens.", "max_tokens"
            )
        if self.background and not self.is_stored:
            raise bad_request("background needs store=true.", param="background")
        for name in self.include or ():
            if name not in INCLUDABLE:
                known = ", ".join(sorted(INCLUDABLE))
                raise bad_request(f"include has {name[:64]!r}; known are {known}.", "include")

    def params(self) -> SamplingParams:
        most = self.max_output_tokens
        form = self.text.format if self.text is not None else None
        return self.sampling(
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            max_tokens=INT32_MAX if most is None else most,  # as far as the model goes
            structured=form and read_field("response_format", form, "text.format"),
            thinking_token_budget=self.budget_of_thought(),
        )
