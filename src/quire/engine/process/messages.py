"""What the two processes say to each other, in frames of JSON (`quire.framing`).

    to the engine     {"do": "add", "number": 7, "prompt": ids, "params": {…}, "options": {…}}
                      {"do": "abort", "number": 7}
                      {"do": "call", "number": 3, "name": "stats", "args": {}}
                      {"do": "stop"}
    from the engine   {"ready": {…}} or {"failed": "a sentence"}, once
                      {"drawn": [7, 0, 1234, …], "updates": [{"number": 7, …}], "answers": [{…}],
                       "blocks": {…}}

A request goes by a number. `drawn` is flat: number, sample, token id, for the many tokens of a step
that come without anything else. `updates` has the rest; each is a `RequestUpdate`. `blocks` are the
changes to which blocks the engine's own tiers hold, sent only if the client asked for them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from quire.beam_params import BeamSearchParams
from quire.engine.pooling.request import TextsAsked, Vectors
from quire.errors import QuireError
from quire.kv.events import SHORT_KEY, BlockEvents
from quire.lora_request import LoRARequest
from quire.params import SamplingParams
from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions

if TYPE_CHECKING:
    from quire.kv.index import TokenIds

Message = dict[str, Any]
Params = SamplingParams | BeamSearchParams | TextsAsked  # of one request


class PackedRequest(TypedDict):
    """A request as it is sent: to an engine and, if that engine dies, perhaps to another."""

    prompt: str
    params: Message
    options: Message


class SampleUpdate(TypedDict, total=False):
    """What one sample has got since the update before."""

    sample: int
    token_ids: list[int]
    logprobs: list[list[Any]]  # for each token: logprob, rank, ids of the best, their logprobs
    finish_reason: str
    stop_reason: int | str | None  # the token id or the stop string that ended it, if one did
    score: float  # of a beam that has ended, …
    cumulative_logprob: float  # … and what it was made from


class RequestUpdate(TypedDict, total=False):
    number: int
    samples: list[SampleUpdate]
    prompt_logprobs: list[list[Any]]
    pooled: Message  # the vectors of texts that were only read
    admitted: Message  # once: how much was cached and how long it waited
    error: str
    error_kind: str  # "request", "queue" or "engine"
    finished: bool
    ended: Message  # with it: how many tokens, why, and when its stages began


class LinkClosed(QuireError):
    """The other process has gone."""


def pack_ids(token_ids: TokenIds) -> str:
    """Token ids as text that is read in one go: a prompt may have a hundred thousand of them."""
    return base64.b64encode(np.asarray(token_ids, dtype="<i4").tobytes()).decode()


def pack_request(prompt_ids: TokenIds, params: Params, options: RequestOptions) -> PackedRequest:
    """A request as a message; its prompt and parameters are checked."""
    return {
        "prompt": pack_ids(prompt_ids),
        "params": pack_params(params),
        "options": pack_options(options),
    }


def unpack_ids(text: str) -> TokenIds:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)


def pack_vectors(vectors: Vectors) -> Message:
    numbers = base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    return {"shape": vectors.shape, "numbers": numbers}


def unpack_vectors(packed: Message) -> Vectors:
    numbers = np.frombuffer(base64.b64decode(packed["numbers"]), dtype="<f4")
    return numbers.reshape(packed["shape"])


def pack_events(events: BlockEvents) -> Message:
    stored, removed = (_pack_keys(keys) for keys in (events.stored, events.removed))
    return {"cleared": events.cleared, "stored": stored, "removed": removed}


def unpack_events(message: Message) -> BlockEvents:
    stored, removed = (_unpack_keys(message[name]) for name in ("stored", "removed"))
    return BlockEvents(message["cleared"], removed, stored)


def _pack_keys(keys: Sequence[bytes]) -> str:
    return base64.b64encode(b"".join(keys)).decode()


def _unpack_keys(text: str) -> list[bytes]:
    joined = base64.b64decode(text)
    return [joined[at : at + SHORT_KEY] for at in range(0, len(joined), SHORT_KEY)]


def pack_params(params: Params) -> Message:
    """The fields that are not at their defaults; a beam search has always its width."""
    if isinstance(params, TextsAsked):
        told = {"lengths": params.lengths, "seconds": params.seconds}
        return {"pooling": _changed_fields(params.params), **told}
    changed = _changed_fields(params)
    if isinstance(params, BeamSearchParams):
        return {**changed, "beam_width": params.beam_width}
    if params.structured is not None:
        changed["structured"] = params.structured.as_dict()
    if params.thought_markers is not None:
        changed["thought_markers"] = asdict(params.thought_markers)
    return changed


def unpack_params(values: Message) -> Params:
    if "pooling" in values:
        asked = PoolingParams(**values["pooling"])
        return TextsAsked(asked, values["lengths"], values["seconds"])
    if "beam_width" in values:
        return BeamSearchParams(**values)
    if bias := values.get("logit_bias"):  # JSON has no keys but strings
        values = {**values, "logit_bias": {int(key): value for key, value in bias.items()}}
    return SamplingParams(**values)


def pack_options(options: RequestOptions) -> Message:
    changed = _changed_fields(options)
    if options.lora_request is not None:
        changed["lora_request"] = asdict(options.lora_request)
    return changed


def unpack_options(values: Message) -> RequestOptions:
    """As the engine in its process needs them: the other process makes the text."""
    asked = values.get("lora_request")
    lora_request = None if asked is None else LoRARequest(**asked)
    return RequestOptions(**{**values, "lora_request": lora_request, "with_text": False})


def _changed_fields(
    settings: SamplingParams | BeamSearchParams | PoolingParams | RequestOptions,
) -> Message:
    """The fields that are not at their defaults."""
    values = ((spec.name, getattr(settings, spec.name), spec.default) for spec in fields(settings))
    return {name: value for name, value, default in values if value != default}
