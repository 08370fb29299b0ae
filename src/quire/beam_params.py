"""Everything a request may ask of beam search, each field with its default, help and check."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from quire.checks import INT32_MAX, Check, apply_checks, flag, number, setting, whole_number
from quire.errors import RequestError
from quire.params import SamplingParams, stop_strings, suggesting_near_misses, token_id_list

MAX_BEAMS = 128
MAX_LENGTH_PENALTY = 16.0

EarlyStopping = bool | Literal["never"]


def _early_stopping() -> Check:
    def accept(value: Any) -> EarlyStopping:
        if isinstance(value, bool):
            return value
        if value == "never":
            return "never"
        raise ValueError(value)

    return Check("True, False or 'never'", accept)


@suggesting_near_misses
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How beam search goes and when it ends; the rule is that of `transformers`.

    A beam's score is the sum of its tokens' log-probabilities, divided by the number of its tokens
    raised to `length_penalty`. A beam ends with an end-of-text token, a stop token, a stop string
    or its last allowed token, and is scored alike in each case.
    """

    beam_width: int = setting(
        4, whole_number(1, MAX_BEAMS), "beams kept in each step, and returned, best first"
    )
    max_tokens: int | None = setting(
        64,
        whole_number(1, INT32_MAX, also=" (or None: as far as the model goes)"),
        "most tokens to generate",
        optional=True,
    )
    length_penalty: float = setting(
        1.0,
        number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "power of a beam's length that its sum of log-probabilities is divided by",
    )
    early_stopping: EarlyStopping = setting(  # noqa: RUF009 - it is frozen
        False,
        _early_stopping(),
        "True ends when beam_width beams have ended; False when the best that goes on scores no "
        "better than those now; 'never' when it could not with all of its tokens",
    )
    stop: Collection[str] = setting(
        (), stop_strings(), "text that ends a beam and is not part of it"
    )
    stop_token_ids: Collection[int] = setting((), token_id_list(), "token ids that end a beam")
    include_stop_str_in_output: bool = setting(
        False, flag(), "keep the stop string that ended a beam in its text"
    )
    min_tokens: int = setting(
        0, whole_number(0, INT32_MAX), "tokens to generate before anything may end a beam"
    )
    ignore_eos: bool = setting(False, flag(), "go on behind the end-of-text token")
    skip_special_tokens: bool = setting(
        True, flag(), "leave special tokens such as end-of-text out of the text"
    )

    def __post_init__(self) -> None:
        apply_checks(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """What a beam asks of a step: nothing is drawn, and it ends when these say so."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )
