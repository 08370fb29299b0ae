"""Decode steps in which nothing is decided, made at once: for a simulation, which knows the tokens
before they are drawn.

Between an admission, the end of a sequence and the filling of a block, each step does the same:
every running sequence computes one token and draws one. `steps_alike` counts these steps, and
`repeat_decode` makes them; the state is then, to the last bit, that of single steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np

from quire.engine.draws.one_token import ONE_TOKEN
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.prefill_rate import FEWEST_TOKENS
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Sequence


def steps_alike(scheduler: Scheduler, under_way: Schedule | None) -> int:
    """How many of the next steps are the same plain decode, and not the last one of a sequence.

    With overlap a step is always `under_way`, and has to be such a decode, too.
    """
    running = scheduler.running
    if not running or scheduler.waiting or scheduler.watch.has_starting:
        return 0
    if len(running) > min(scheduler.budget, FEWEST_TOKENS - 1):
        return 0  # sequences take turns, or their steps count towards the prefill rate
    if under_way is not None and not _decodes_all(under_way, running):
        return 0
    return min(_steps_of(sequence, scheduler) for sequence in running)


def repeat_decode(
    scheduler: Scheduler, under_way: Schedule | None, tokens: Listed[int], num_steps: int
) -> None:
    """Each running sequence draws its one of `tokens` in each of `num_steps` steps."""
    scheduler.step_number += num_steps
    for sequence, token in zip(scheduler.running, tokens, strict=True):
        sequence.tokens.extend(np.full(num_steps, token, dtype=np.int32))
        sequence.num_computed += num_steps
        sequence.last_step = scheduler.step_number
        assert sequence.table is not None
        sequence.table.append(num_steps)
    if under_way is not None:  # the last of these steps is now the one under way
        under_way.number += num_steps
        for chunk in under_way.chunks:
            chunk.start += num_steps


def _decodes_all(schedule: Schedule, running: list[Sequence]) -> bool:
    chunks = schedule.chunks
    drawn = [chunk.sequence for chunk in chunks if chunk.count == 1 and chunk.draw is ONE_TOKEN]
    return len(drawn) == len(chunks) and drawn == running


def _steps_of(sequence: Sequence, scheduler: Scheduler) -> int:
    """How many steps it goes on in its last block, after which it neither ends nor publishes."""
    table, request, count = sequence.table, sequence.request, sequence.tokens.count
    assert table is not None
    if sequence.remaining != 1 or _is_read_by_token(sequence):
        return 0
    if scheduler.cache.enabled and scheduler.prefixes.publishable(sequence, sequence.num_computed):
        return 0
    until_end = request.max_tokens + sequence.prompt_len - count - 1
    return min(table.room - 1, until_end)


def _is_read_by_token(sequence: Sequence) -> bool:
    """Whether each token it draws decides something, or is shown."""
    request = sequence.request
    if request.stop_ids or request.streaming or request.search is not None:
        return True
    if sequence.detokenizer is not None or sequence.grammar is not None:
        return True
    if sequence.thought is not None:
        return True
    return sequence.params.logprobs is not None
