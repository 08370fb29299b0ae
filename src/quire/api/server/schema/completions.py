"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, WithJsonSchema

from quire.api.server.errors import bad_request
from quire.api.server.schema.fields import GenerationFields
from quire.params import SamplingParams

MAX_PROMPTS = 256
MAX_CHOICES = 1024  # prompts times n

Prompt = str | list[int]


def read_prompts(value: Any, *, most: int = MAX_PROMPTS) -> list[Prompt]:
    """One string or one list of ids is one prompt. Ids are checked where they are used."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("it must be text, token ids, or a list of either, and not be empty")
    if isinstance(value[0], int):
        return [value]
    if len(value) > most:
        raise ValueError(f"{len(value):,} prompts came at once; send at most {most:,}")
    if not all(isinstance(each, (str, list)) for each in value):
        raise ValueError("each prompt must be text or a list of token ids")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ONE = {"anyOf": [{"type": "string"}, _IDS]}
PROMPTS_SCHEMA = WithJsonSchema(
    {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1}]}
)
Prompts = Annotated[Any, AfterValidator(read_prompts), PROMPTS_SCHEMA]


class CompletionRequest(GenerationFields):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "continue_final_message": (False,),
        # Of chats: a completion has no template that could ask the model to think.
        "enable_thinking": (),
        "reasoning": (),
        "reasoning_effort": (),
        "thinking": (),
        "thinking_budget": (),
        "thinking_token_budget": (-1,),
    }

    prompt: Prompts
    suffix: str | None = None  # what comes behind the text, of models that fill in
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        if len(prompts) * (self.best_of or self.n or 1) > MAX_CHOICES:
            raise bad_request(
                f"prompts times n is more than {MAX_CHOICES:,}; ask for fewer.", param="n"
            )
        return prompts

    def check_suffix(self) -> None:
        if not self.suffix:
            return
        if self.echo:
            raise bad_request("echo shows a prompt, and suffix has two; leave one out.", "suffix")
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise bad_request("suffix needs prompts that are text.", param="suffix")

    def params(self) -> SamplingParams:
        judged, limit = self.prompt_logprobs, self.token_limit()
        if self.echo and (self.logprobs is not None or limit == 0) and judged is None:
            judged = self.logprobs or 0
        return self.sampling(
            max_tokens=16 if limit is None else limit,
            logprobs=self.logprobs,
            prompt_logprobs=judged,
        )
