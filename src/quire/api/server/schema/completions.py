"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quire.api.server.errors import bad_request
from quire.api.server.schema.fields import GenerationFields
from quire.params import SamplingParams

MAX_PROMPTS = 256
MAX_CHOICES = 1024  # prompts times n

Prompt = str | list[int]


class CompletionRequest(GenerationFields):
    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[Prompt]:
        """One string or one list of ids is one prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise bad_request("prompt is empty; give at least one.", param="prompt")
        if len(prompt) > MAX_PROMPTS:
            raise bad_request(
                f"{len(prompt):,} prompts came at once; send at most {MAX_PROMPTS}.", param="prompt"
            )
        if len(prompt) * (self.best_of or self.n or 1) > MAX_CHOICES:
            raise bad_request(
                f"prompts times n is more than {MAX_CHOICES:,}; ask for fewer.", param="n"
            )
        return list(prompt)

    def params(self) -> SamplingParams:
        judged = self.prompt_logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0) and judged is None:
            judged = self.logprobs or 0
        return self.sampling(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=judged,
        )
