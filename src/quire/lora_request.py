"""Which adapter a request is for, by the name that users of vLLM know."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.errors import ConfigError, RequestError

NAME_CHARS = 200


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: a `peft` folder, under a name.

    What was read once is used for all requests that are equal to the first, whatever becomes of the
    folder. To use a folder that has changed, ask with another `lora_int_id`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    # Of the contents that the folder must have; "" takes what is there.
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RequestError(f"{name} of a LoRARequest is a string that is not empty.")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id of a LoRARequest is a whole number from 1, not {self.lora_int_id!r}."
            )


class LoRAModule(NamedTuple):
    """An adapter as `--lora-modules` names it."""

    name: str
    path: str


def read_module(text: str) -> LoRAModule:
    """From `name=path`, or vLLM's JSON with `name` and `path`; ConfigError if it is neither."""
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError:
            given = {}
        name, path = given.get("name"), given.get("path")
    else:
        name, _, path = text.partition("=")
    if not is_adapter_name(name) or not isinstance(path, str) or not path:
        raise ConfigError(
            f"lora_modules has name=path, or JSON with name and path, not {text[:200]!r}."
        )
    return LoRAModule(name, path)


def is_adapter_name(name: object) -> bool:
    """Whether clients can send it and people can read it."""
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARS and name.isprintable()
