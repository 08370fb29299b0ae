"""Fields that requests of every API share, and how fields that Quire has not are treated.

Types are checked here, ranges by `SamplingParams`: None stands for its default. What an API has
and Quire has not is refused by name, and so is what other servers have (`other_servers`), or
another of Quire's APIs (`other_apis`), and what would change an answer; an unknown field is
ignored, and logged (`unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.api.server.errors import bad_request
from quire.api.server.keys import Tenant
from quire.api.server.schema.other_apis import ELSEWHERE, refusal_elsewhere
from quire.api.server.schema.other_servers import REFUSED, refusal
from quire.params import MAX_BIASES, SamplingParams
from quire.request_options import RequestOptions

MAX_SALT_CHARS = 256

# Lists that `SamplingParams` checks as a whole: pydantic would check a million items one by one,
# and remember what is wrong with each. This is how the API's document shows them.
Ids = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]
Biases = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


class CommonFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    # The API's, by name: the values that mean "not asked for", and so may be sent.
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    stream: bool | None = None

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None

    def refuse_unsupported(self) -> None:
        """Raise for a known field that would have no effect."""
        for name, value in (self.model_extra or {}).items():
            if (says := self._refusal(name, value)) is not None:
                raise bad_request(says, param=name, code="unsupported_parameter")

    def unknown_fields(self) -> list[str]:
        """Names that Quire neither reads nor refuses."""
        extra = self.model_extra or {}
        known = (self.NOT_SUPPORTED, REFUSED, ELSEWHERE)
        return [name for name in extra if not any(name in names for names in known)]

    def _refusal(self, name: str, value: Any) -> str | None:
        neutral = self.NOT_SUPPORTED.get(name)
        if neutral is None:
            return refusal(name, value) or refusal_elsewhere(name, value)
        if value is None or value in neutral:
            return None
        return f"{name} is not supported by this server; leave it out."

    def options(self, caller: Tenant, name: str, queue_s: float) -> RequestOptions:
        """How the caller's request is served; `name` is the answer's id."""
        return RequestOptions(
            stream=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=caller.namespace(self.cache_salt or ""),
            tenant=caller.salt or None,  # without keys each salt is a tenant
            model=self.model or "",
            name=name,
            background=caller.in_background,
            turn=caller.turn,
            queue_s=None if caller.in_background else queue_s,
        )

    def sampling(self, **others: Any) -> SamplingParams:
        """The request as `SamplingParams`; RequestError for what is out of range."""
        names = SAMPLING_NAMES & type(self).model_fields.keys()
        asked = {name: getattr(self, name) for name in names} | others
        asked = {name: value for name, value in asked.items() if value is not None}
        if len(asked.get("logit_bias", ())) <= MAX_BIASES and "logit_bias" in asked:
            asked["logit_bias"] = {_token_id(k): v for k, v in asked["logit_bias"].items()}
        return SamplingParams(**asked)


# `logprobs` and `max_tokens` mean something else in each of the APIs; forms of output and budgets
# for thinking have many names.
SAMPLING_NAMES = set(SamplingParams.__dataclass_fields__) - {
    "logprobs",
    "max_tokens",
    "structured",
    "thinking_token_budget",
}


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise bad_request(
            f"logit_bias has token ids for keys, not {key[:50]!r}.", param="logit_bias"
        )
    return int(key)
