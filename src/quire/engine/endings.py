"""How sequences and requests end."""

from __future__ import annotations

from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Request, Sequence, Status


def finish_request(scheduler: Scheduler, request: Request, reason: str) -> None:
    """End all of its sequences now; their blocks are free when this returns."""
    for sequence in request.sequences:
        if sequence.status is not Status.FINISHED:
            scheduler.finish(sequence, reason)
            if sequence.detokenizer is not None:
                sequence.detokenizer.flush()


def fail_request(
    scheduler: Scheduler, request: Request, error: str, is_at_fault: bool = False
) -> None:
    request.error, request.is_at_fault = error, is_at_fault
    finish_request(scheduler, request, "error")


def finish_reason(sequence: Sequence, token_id: int) -> str | None:
    """Why a sequence ends with its last token, if it does; text and grammar are moved on by it."""
    request, detokenizer, grammar = sequence.request, sequence.detokenizer, sequence.grammar
    num_output = sequence.tokens.count - sequence.prompt_len
    ended = token_id in request.stop_ids and num_output > request.params.min_tokens
    if detokenizer is not None and not ended:
        detokenizer.push([token_id])
        if detokenizer.stopped:
            return "stop"
    if grammar is not None and not ended:
        grammar.follow(sequence.output_ids)
        ended = grammar.is_complete
    length = num_output >= request.max_tokens
    if detokenizer is not None and (ended or length):
        detokenizer.flush()
    return "stop" if ended else "length" if length else None
