"""The body of `POST /v1/batches`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_PAIRS, MOST_KEY_CHARS, MOST_VALUE_CHARS = 16, 64, 512
SECONDS = {"m": 60, "h": 3600, "d": 86_400}
LONGEST_S = 30 * SECONDS["d"]
WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")


def window_seconds(window: str) -> int | None:
    """`24h` in seconds; None if it is no such text, or too long a time."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    return seconds if 0 < seconds <= LONGEST_S else None


class CreateBatch(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Annotated[str, Field(max_length=100)]
    completion_window: Annotated[str, Field(max_length=10)] = "24h"
    metadata: dict[str, str] | None = None

    @field_validator("completion_window")
    @classmethod
    def _window(cls, value: str) -> str:
        if window_seconds(value) is None:
            raise ValueError("it is a time of up to 30 days, such as 24h")
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        pairs = (value or {}).items()
        fits = all(len(k) <= MOST_KEY_CHARS and len(v) <= MOST_VALUE_CHARS for k, v in pairs)
        if len(pairs) > MOST_PAIRS or not fits:
            raise ValueError(
                f"it has up to {MOST_PAIRS} names of {MOST_KEY_CHARS} characters, "
                f"with texts of {MOST_VALUE_CHARS}"
            )
        return value
