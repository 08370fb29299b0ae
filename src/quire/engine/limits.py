"""What a request may be, as the engine and the server in front of it both check it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.errors import PromptTooLong, RequestError
from quire.kv.keys import ADAPTER_MARK
from quire.lora_request import LoRARequest
from quire.params import SamplingParams, check_against_vocab
from quire.request_options import RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

WRITES_TEXT = (
    "This model writes text, and gives no embeddings or scores: ask another one, or serve it with "
    "task='embed' or task='score'."
)
EMPTY = "The prompt is empty; give at least one token."
WRITES_NO_TEXT = "This model writes no text: ask it for embeddings, scores or classes."


@dataclass(frozen=True)
class Limits:
    """An engine's vocabulary, longest sequence, policy of its queue, whether it has slots for
    adapters, and what its model does."""

    vocab_size: int
    max_model_len: int
    policy: str = "fcfs"
    takes_adapters: bool = False
    task: str = "generate"  # or "embed", or "classify"

    def check(
        self,
        token_ids: Sequence[int] | TokenIds,
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Raise RequestError for what the engine would not take; `token_ids` are valid already."""
        self.check_writes()
        check_against_vocab(params, self.vocab_size)
        if options.stream and params.num_samples > params.n:
            raise RequestError("best_of above n cannot stream: the best is known only at the end.")
        self._check_priority(options)
        if not isinstance(options.cache_salt, str):
            raise RequestError(f"cache_salt is a string, not {options.cache_salt!r}.")
        if ADAPTER_MARK in options.cache_salt:
            raise RequestError("cache_salt has the character U+0000 in it; leave that out.")
        if options.lora_request is not None:
            self._check_adapter(options.lora_request)
        if len(token_ids) + (params.max_tokens != 0) > self.max_model_len:
            size, mend = f"{len(token_ids):,} tokens", "shorten it, and leave room for an answer"
            raise PromptTooLong.of("prompt", size, self.max_model_len, mend)

    def check_writes(self) -> None:
        """Raise RequestError where the model only reads."""
        if self.task != "generate":
            raise RequestError(WRITES_NO_TEXT)

    def check_text(self, num_tokens: int, options: RequestOptions) -> None:
        """The same for a text that is only read."""
        if self.task == "generate":
            raise RequestError(WRITES_TEXT)
        self._check_priority(options)
        if num_tokens > self.max_model_len:
            mend = "shorten it, or have it cut with truncate_prompt_tokens"
            raise PromptTooLong.of("text", f"{num_tokens:,} tokens", self.max_model_len, mend)

    def _check_priority(self, options: RequestOptions) -> None:
        if not isinstance(options.priority, int):
            raise RequestError(f"priority is a whole number, not {options.priority!r}.")
        if options.priority and self.policy != "priority":
            raise RequestError("priority counts only with scheduling_policy='priority'; set it.")

    def _check_adapter(self, asked: object) -> None:
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request is a LoRARequest, not {type(asked).__name__}.")
        if not self.takes_adapters:
            raise RequestError("lora_request needs an engine with enable_lora=True; set it.")


def checked_ids(prompt: Sequence[int] | TokenIds, vocab_size: int) -> TokenIds:
    """Token ids as an array; without a Python loop, for prompts may be long."""
    if len(prompt) == 0:
        raise RequestError(EMPTY)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("A prompt is a string or a list of token ids (integers).")
    check_vocabulary(ids, vocab_size)
    return ids.astype(np.int32)


def check_vocabulary(ids: npt.NDArray[Any], vocab_size: int) -> None:
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise RequestError(
            f"Token id {bad[0]} is outside the model's vocabulary of {vocab_size:,} (0 to "
            f"{vocab_size - 1})."
        )
