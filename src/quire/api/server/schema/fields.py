"""Fields that completions and chats, OpenAI's two APIs, share beyond those of every API."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from quire.api.server.answers.prompts import Prompt
from quire.api.server.answers.response_format import STRUCTURED_FIELDS, read_structured
from quire.api.server.errors import bad_request
from quire.api.server.schema.beams import beam_search
from quire.api.server.schema.common import CommonFields
from quire.beam_params import BeamSearchParams
from quire.params import SamplingParams

_TEXT = {"type": "string"}
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})]

# The ways to ask for a form of output; `quire.api.server.answers.response_format` reads them.
_SCHEMA = {"type": "object"}
Schema = Annotated[Any, WithJsonSchema({"anyOf": [_SCHEMA, _TEXT]})]
Grammar = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _SCHEMA]})]
ResponseFormat = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "regex", "grammar"]},
                "schema": _SCHEMA,
                "regex": _TEXT,
                "grammar": _TEXT,
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": _TEXT,
                        "schema": _SCHEMA,
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
            "required": ["type"],
        }
    ),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; there is none here


class GenerationFields(CommonFields):
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_completion_tokens: int | None = None  # some clients send both names, wherever they ask
    n: int | None = None
    stop: Texts | None = None

    # Beyond OpenAI's; by `extra_body` in its client.
    best_of: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    regex: str | None = None
    json_schema: Schema | None = None
    ebnf: str | None = None
    grammar: Grammar | None = None
    structured_outputs: dict[str, Any] | None = None
    structured: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    def token_limit(self) -> int | None:
        """`max_tokens`, by either of its names."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request(
                "max_tokens and max_completion_tokens differ; give one, not both.",
                param="max_tokens",
            )
        return limits.pop() if limits else None

    def cut(self, prompt: Prompt, max_model_len: int, params: SamplingParams) -> Prompt:
        """The last tokens of a prompt, if the request wants no more; -1 is as many as fit."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        if most != -1 and not 1 <= most <= max_model_len:
            raise bad_request(
                f"truncate_prompt_tokens must be -1 or 1 to {max_model_len:,}.",
                param="truncate_prompt_tokens",
            )
        if most == -1:
            most = max_model_len - (params.max_tokens != 0)
        if len(prompt.token_ids) <= most:
            return prompt
        return replace(prompt, token_ids=prompt.token_ids[-most:], text=None)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true.", param="stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, **others: Any) -> SamplingParams:
        asked = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        return super().sampling(structured=read_structured(asked), **others)

    def beam_search(self, params: SamplingParams) -> BeamSearchParams | None:
        """The parameters of a beam search, if the request asks for one; all `n` beams come back."""
        asked = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        return beam_search(params, asked, bool(self.use_beam_search), bool(self.stream))
