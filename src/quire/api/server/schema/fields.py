"""Fields that completions and chats share.

Types are checked here, ranges by `SamplingParams`: None stands for its default. What OpenAI has
and Quire has not is refused by name, and so is what other servers have and what would change an
answer (`other_servers`); an unknown field is ignored, and logged
(`unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.api.server.answers.response_format import STRUCTURED_FIELDS, read_structured
from quire.api.server.errors import bad_request
from quire.api.server.keys import Tenant
from quire.api.server.schema.beams import beam_search
from quire.api.server.schema.other_servers import REFUSED, refusal
from quire.beam_params import BeamSearchParams
from quire.params import MAX_BIASES, SamplingParams
from quire.request_options import RequestOptions

MAX_SALT_CHARS = 256

# Lists that `SamplingParams` checks as a whole: pydantic would check a million items one by one,
# and remember what is wrong with each. This is how the API's document shows them.
_TEXT, _ID = {"type": "string"}, {"type": "integer"}
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})]
Ids = Annotated[Any, WithJsonSchema({"type": "array", "items": _ID})]
Biases = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]

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


class GenerationFields(BaseModel):
    """Fields of every request that generates."""

    model_config = ConfigDict(strict=True, extra="allow")

    # OpenAI's, by name: the values that mean "not asked for", and so may be sent.
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Texts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None

    # Beyond OpenAI's; by `extra_body` in its client.
    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
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
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None

    def refuse_unsupported(self) -> None:
        """Raise for a known field that would have no effect."""
        for name, value in (self.model_extra or {}).items():
            if (says := self._refusal(name, value)) is not None:
                raise bad_request(says, param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true.", param="stream_options")

    def unknown_fields(self) -> list[str]:
        """Names that Quire neither reads nor refuses."""
        extra = self.model_extra or {}
        return [name for name in extra if name not in self.NOT_SUPPORTED and name not in REFUSED]

    def _refusal(self, name: str, value: Any) -> str | None:
        neutral = self.NOT_SUPPORTED.get(name)
        if neutral is None:
            return refusal(name, value)
        if value is None or value in neutral:
            return None
        return f"{name} is not supported by this server; leave it out."

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, caller: Tenant, name: str, queue_s: float) -> RequestOptions:
        """How the caller's request is served; `name` is the answer's id."""
        return RequestOptions(
            stream=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=caller.namespace(self.cache_salt or ""),
            tenant=caller.salt or None,  # without keys each salt is a tenant
            model=self.model or "",
            name=name,
            queue_s=queue_s,
        )

    def sampling(self, **others: Any) -> SamplingParams:
        """The request as `SamplingParams`; RequestError for what is out of range."""
        names = SAMPLING_NAMES & type(self).model_fields.keys()
        asked = {name: getattr(self, name) for name in names} | others
        asked = {name: value for name, value in asked.items() if value is not None}
        if len(asked.get("logit_bias", ())) <= MAX_BIASES and "logit_bias" in asked:
            asked["logit_bias"] = {_token_id(k): v for k, v in asked["logit_bias"].items()}
        asked["structured"] = read_structured(
            {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        )
        return SamplingParams(**asked)

    def beam_search(self, params: SamplingParams) -> BeamSearchParams | None:
        """The parameters of a beam search, if the request asks for one; all `n` beams come back."""
        asked = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        return beam_search(params, asked, bool(self.use_beam_search), bool(self.stream))


# `logprobs` and `max_tokens` mean something else in each of OpenAI's two shapes.
SAMPLING_NAMES = set(SamplingParams.__dataclass_fields__) - {"logprobs", "max_tokens"}


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise bad_request(
            f"logit_bias has token ids for keys, not {key[:50]!r}.", param="logit_bias"
        )
    return int(key)
