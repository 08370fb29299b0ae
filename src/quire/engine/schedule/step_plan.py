"""From the scheduler's choice to a plan of plain data."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from quire.engine.draws.one_token import ONE_TOKEN
from quire.engine.draws.sample_row import sample_row
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.sequence import Sequence
from quire.kv.table import BlockTable
from quire.runner.plan import GroupTables, PromptLogprobRows, StepPlan
from quire.runner.sampling.sampler import SampleRow


def step_plan(schedule: Schedule, before: Schedule | None = None) -> StepPlan:
    """`before` is the step under way, whose draws may be this step's inputs."""
    drawn_before = {} if before is None else _drawn(before)
    chunks = schedule.chunks
    counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    token_ids = np.zeros(ends[-1], dtype=np.int32)
    samples: list[SampleRow] = []
    sample_rows: list[int] = []
    fed_rows: list[int] = []
    fed_from: list[int] = []
    next_rows: list[int] = []
    next_ids: list[int] = []
    prompt_rows: list[PromptLogprobRows] = []
    is_masked = False
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        sequence, draw, count = chunk.sequence, chunk.draw, chunk.count
        length = chunk.start + count
        place = -1
        if chunk.is_fed:
            place = drawn_before[sequence]
            fed_rows.append(end - 1)
            fed_from.append(place)
        if place == -1 or count > 1:
            known = sequence.tokens.ids[chunk.start : length]
            first = end - count
            token_ids[first : first + len(known)] = known
        if draw is ONE_TOKEN:  # as most are
            samples.append(sample_row(sequence, length, sequence.seed, place))
            sample_rows.append(end - 1)
        else:
            token_ids[end - draw.num_drafts : end] = draw.drafts
            samples += draw.sample_rows(chunk, place)
            sample_rows += draw.positions(end)
            if not draw.count and length < sequence.tokens.count:
                next_rows.append(end - 1)
                next_ids.append(sequence.tokens.ids[length])
        if sequence.may_be_masked and draw.count and chunk.is_masked:
            is_masked = True
        if chunk.prompt_scored:
            prompt_rows.append(_prompt_logprob_rows(chunk, end - count))
    return StepPlan(
        token_ids=token_ids,
        fed_rows=np.array(fed_rows, dtype=np.int32),
        fed_from=np.array(fed_from, dtype=np.int32),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        counts=counts,
        tables=_group_tables(chunks),
        samples=samples,
        sample_rows=np.array(sample_rows, dtype=np.int32),
        prompt_logprobs=prompt_rows,
        is_masked=is_masked,
        next_rows=np.array(next_rows, dtype=np.int32),
        next_ids=np.array(next_ids, dtype=np.int32),
    )


def _drawn(schedule: Schedule) -> dict[Sequence, int]:
    """Which of a step's draws is each sequence's own."""
    place, places = 0, {}
    for chunk in schedule.chunks:
        if num_drawn := chunk.draw.count:
            places[chunk.sequence] = place
            place += num_drawn
    return places


def _prompt_logprob_rows(chunk: Chunk, first_row: int) -> PromptLogprobRows:
    positions, k = chunk.prompt_scored, chunk.sequence.params.prompt_logprobs
    assert k is not None
    next_ids = chunk.sequence.request.prompt_ids[positions.start + 1 : positions.stop + 1]
    return PromptLogprobRows(first_row + positions.start - chunk.start, next_ids, k)


def _group_tables(chunks: list[Chunk]) -> tuple[GroupTables, ...]:
    """The blocks of all sequences, by KV group."""
    tables: list[Any] = [chunk.sequence.table for chunk in chunks]  # all of one kind
    if isinstance(tables[0], BlockTable):
        return (_tables_of(tables),)
    return tuple(map(_tables_of, zip(*(table.groups for table in tables), strict=True)))


def _tables_of(tables: Seq[BlockTable]) -> GroupTables:
    """The blocks of all sequences in one group."""
    has_window = tables[0].window is not None
    firsts = [table.first for table in tables] if has_window else ()
    return GroupTables.of([table.ids for table in tables], firsts)
