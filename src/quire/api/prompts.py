"""What a caller may give as a prompt, in Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from quire.errors import RequestError

Prompt = str | Sequence[int] | dict[str, Any]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one; a flat list of ids is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"Prompts are strings or lists of token ids, not {kind_name(prompts)}.")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    return listed


def plain_prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, dict):
        if set(prompt) - {"prompt", "prompt_token_ids"} or not prompt:
            raise RequestError(
                "A prompt dict has 'prompt_token_ids' or 'prompt', and no other key."
            )
        return plain_prompt(
            prompt["prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"]
        )
    if isinstance(prompt, str):
        return prompt
    is_list = isinstance(prompt, Sequence) or hasattr(prompt, "tolist")  # or an array
    if is_list and not isinstance(prompt, bytes):
        return [*prompt]
    raise RequestError(f"A prompt is a string or a list of token ids, not {kind_name(prompt)}.")


def kind_name(value: object) -> str:
    return type(value).__name__
