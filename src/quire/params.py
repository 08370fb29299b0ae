"""Everything a request may ask of sampling, said once: name, type, default, help and check.

Keywords, command-line flags and help texts are made from the fields of `SamplingParams`. Every
value passes its field's check, so the engine behind never meets a NaN, a huge list or a string
where a number should be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.checks import (
    INT32_MAX,
    Check,
    apply_checks,
    flag,
    number,
    real,
    refuse_unknown,
    setting,
    share,
    whole,
    whole_number,
)
from quire.errors import RequestError
from quire.structured import StructuredOutput, structured_output
from quire.thinking import ThoughtMarkers, thought_markers

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_BIAS = 100.0

GREEDY_BELOW = 1e-5  # a temperature this close to 0 leaves nothing to draw

T = TypeVar("T")


def _items(value: Any, most: int) -> Collection[Any]:
    if value is None:
        return ()
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        raise TypeError(value)
    if len(value) > most:
        raise ValueError(value)
    return value


def stop_strings() -> Check:
    def accept(value: Any) -> tuple[str, ...]:
        texts = tuple(_items([value] if isinstance(value, str) else value, MAX_STOPS))
        for text in texts:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ValueError(text)
        return tuple(dict.fromkeys(texts))

    return Check(
        f"one string, or up to {MAX_STOPS}, each of 1 to {MAX_STOP_CHARS:,} characters", accept
    )


def token_id_list() -> Check:
    def accept(value: Any) -> tuple[int, ...]:
        ids = _items(value, MAX_STOP_TOKEN_IDS)
        return tuple(dict.fromkeys(whole(item, 0, INT32_MAX) for item in ids))

    return Check(f"a list of up to {MAX_STOP_TOKEN_IDS:,} token ids", accept)


def _biases() -> Check:
    def accept(value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise TypeError(value)
        if len(value) > MAX_BIASES:
            raise ValueError(value)
        return {
            whole(token_id, 0, INT32_MAX): real(bias, -MAX_BIAS, MAX_BIAS)
            for token_id, bias in value.items()
        }

    return Check(
        f"a dict of up to {MAX_BIASES:,} token ids, each with a bias "
        f"from {-MAX_BIAS:g} to {MAX_BIAS:g}",
        accept,
    )


def suggesting_near_misses(cls: type[T]) -> type[T]:
    """An unknown keyword becomes a RequestError that names the setting it looks like."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **settings: Any) -> None:
        refuse_unknown(cls, settings, RequestError, "sampling parameter")
        init(self, *args, **settings)

    cls.__init__ = checked_init  # type: ignore[assignment,method-assign]
    return cls


@suggesting_near_misses
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends; the defaults are vLLM's.

    What may be asked for is bounded: up to 128 samples, 20 logprobs a token, 64 stop strings of
    1,024 characters, 1,024 stop token ids, 1,024 biases from −100 to 100, temperatures up to 100.
    A value outside its range is a RequestError. Settings apply in this order: bias and penalties,
    the form that `structured` asks for, temperature, min_p, top_k, top_p. `stop` takes one string
    or several and is kept as a tuple; `structured` takes a dict too.
    """

    n: int = setting(1, whole_number(1, MAX_SAMPLES), "samples returned for each prompt")
    best_of: int | None = setting(
        None,
        whole_number(1, MAX_SAMPLES),
        "samples drawn, of which the n likeliest are returned (default: n)",
    )
    temperature: float = setting(
        1.0, number(0, 100), "0 always takes the likeliest token; higher is more random"
    )
    top_k: int = setting(
        0,
        whole_number(-1, INT32_MAX, also=" (0 or -1 is off)"),
        "draw only among this many likeliest tokens; 0 or -1 is off",
    )
    top_p: float = setting(
        1.0, share(), "draw only among the likeliest tokens that together have this probability"
    )
    min_p: float = setting(
        0.0, number(0, 1), "leave out tokens less likely than this share of the likeliest one"
    )
    repetition_penalty: float = setting(
        1.0,
        number(0.01, 100),
        "above 1 makes tokens of the prompt and the output less likely to come again",
    )
    presence_penalty: float = setting(
        0.0, number(-2, 2), "taken off the logit of every token generated before"
    )
    frequency_penalty: float = setting(
        0.0, number(-2, 2), "taken off a token's logit for each time it was generated before"
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, _biases(), "added to the logits of these token ids"
    )
    stop: Collection[str] = setting(
        (), stop_strings(), "text that ends the output and is not part of it"
    )
    stop_token_ids: Collection[int] = setting((), token_id_list(), "token ids that end the output")
    include_stop_str_in_output: bool = setting(
        False, flag(), "keep the stop string that ended the output in its text"
    )
    min_tokens: int = setting(
        0, whole_number(0, INT32_MAX), "tokens to generate before anything may end the output"
    )
    max_tokens: int | None = setting(
        16,
        whole_number(0, INT32_MAX, also=" (or None: as far as the model goes)"),
        "most tokens to generate",
        optional=True,
    )
    ignore_eos: bool = setting(False, flag(), "go on behind the end-of-text token")
    seed: int | None = setting(
        None,
        whole_number(-(2**63), 2**64 - 1),
        "makes the draws repeatable, whatever else is in the batch",
    )
    logprobs: int | None = setting(
        None,
        whole_number(0, MAX_LOGPROBS),
        "log-probability of each generated token, and of this many likeliest ones beside it",
    )
    prompt_logprobs: int | None = setting(
        None, whole_number(0, MAX_LOGPROBS), "the same for the tokens of the prompt"
    )
    skip_special_tokens: bool = setting(
        True, flag(), "leave special tokens such as end-of-text out of the text"
    )
    structured: StructuredOutput | None = setting(  # noqa: RUF009 - it is frozen
        None,
        structured_output(),
        'the form of the output, such as {"regex": "[0-9]+"}: one of json_object, json_schema, '
        "regex, choice, grammar",
    )
    thinking_token_budget: int | None = setting(
        None,
        whole_number(0, INT32_MAX),
        "most tokens of a chat's thoughts; then the model has to answer",
    )
    thought_markers: ThoughtMarkers | None = setting(  # noqa: RUF009 - it is frozen
        None,
        thought_markers(),
        "the tokens that open and close a thought; chats have them from the model's template",
    )

    def __post_init__(self) -> None:
        apply_checks(self, RequestError)
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n ({self.n}), not {self.best_of}.")
        if self.max_tokens is None:
            return
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1; 0 needs prompt_logprobs.")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}."
            )

    # The engine asks these of every row of every step: each is worked out once.

    @functools.cached_property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @functools.cached_property
    def needs_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @functools.cached_property
    def num_samples(self) -> int:
        return self.best_of or self.n


def _marker_ids(markers: ThoughtMarkers | None) -> tuple[int, ...]:
    if markers is None:
        return ()
    return (*markers.opens, *markers.closes, *markers.ends, *markers.between)


def check_against_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    for name, ids in [
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("thought_markers", _marker_ids(params.thought_markers)),
    ]:
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} names token {max(ids)}, but the model's ids end at {vocab_size - 1}."
            )
