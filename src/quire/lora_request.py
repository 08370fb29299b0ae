"""Which adapter a request is for, by the name that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: a `peft` folder, under a name.

    What was read once is used for all requests that are equal to the first, whatever becomes of the
    folder. To use a folder that has changed, ask with another `lora_int_id`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    fingerprint: str = ""  # of the contents that the folder must have; "" takes what is there

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RequestError(f"{name} of a LoRARequest is a string that is not empty.")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id of a LoRARequest is a whole number from 1, not {self.lora_int_id!r}."
            )
