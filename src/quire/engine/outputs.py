"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.engine.sequence import Logprob, Request, Sequence, TokenLogprobs
from quire.engine.text.detokenizer import whole_text
from quire.models.text.tokenizer import Tokenizer
from quire.runner.sampling.sampler import Logprobs


@dataclass
class CompletionOutput:
    """One sample: `text` without the end-of-text token, `token_ids` with it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop, length, abort or error
    cumulative_logprob: float | None = None
    score: float | None = None  # of a beam: that, with the length penalty
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    reasoning: str | None = None  # of a chat whose model thinks; `text` is the words


@dataclass
class RequestOutput:
    """A prompt and its samples, so far or whole."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
    speculation: dict[str, Any] | None = None  # how its drafts fared, if it had any
    error: str | None = None


def request_output(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    cached = request.num_cached_tokens or 0
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=_completions(request, tokenizer),
        finished=request.finished,
        num_cached_tokens=cached,
        cached_tokens_by_tier=dict(request.cached_tokens_by_tier),
        miss_reason=request.miss_reason,
        prompt_logprobs=_prompt_logprobs(request, tokenizer),
        speculation=request.drafts.as_dict() if request.drafts.steps else None,
        error=request.error,
    )


def _completions(request: Request, tokenizer: Tokenizer | None) -> list[CompletionOutput]:
    return [_completion(sequence, i, tokenizer) for i, sequence in enumerate(returned(request))]


def returned(request: Request) -> list[Sequence]:
    """The samples that the caller gets: of `best_of`, once all are there, the `n` likeliest."""
    sequences = request.sequences
    if request.finished and request.params.num_samples > request.params.n:
        ranked = sorted(sequences, key=lambda s: s.cumulative_logprob, reverse=True)
        return ranked[: request.params.n]
    return sequences


def _completion(sequence: Sequence, index: int, tokenizer: Tokenizer | None) -> CompletionOutput:
    params = sequence.params
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=_text(sequence, tokenizer),
        token_ids=sequence.output_ids.tolist(),
        finish_reason=sequence.finish_reason,
        cumulative_logprob=sequence.cumulative_logprob
        if has_logprobs or params.num_samples > params.n or sequence.request.search
        else None,
        score=sequence.score,
        logprobs=_named(sequence.logprobs, sequence.named_logprobs, tokenizer)
        if has_logprobs
        else None,
        error=sequence.request.error,
    )


def _text(sequence: Sequence, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    if sequence.detokenizer is not None:
        return sequence.detokenizer.text
    ids = sequence.output_ids.tolist()
    if sequence.ended_by_token:
        ids = ids[:-1]
    return whole_text(tokenizer, sequence.params, ids, sequence.request.prompt_ids)


def _prompt_logprobs(
    request: Request, tokenizer: Tokenizer | None
) -> list[TokenLogprobs | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None, *_named(request.prompt_logprobs, request.named_logprobs, tokenizer)]


def _named(
    entries: list[Logprobs], named: list[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[TokenLogprobs]:
    """The entries with their tokens' texts; those named for an earlier output are kept."""

    def name(token_id: int) -> str | None:
        return tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else None

    for entry in entries[len(named) :]:
        named.append({i: Logprob(value, rank, name(i)) for i, value, rank in entry.entries()})
    return list(named)
