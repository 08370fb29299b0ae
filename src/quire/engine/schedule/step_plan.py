"""From the scheduler's choice to a plan of plain data."""

from __future__ import annotations

import numpy as np

from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.sequence import Sequence
from quire.kv.index import TokenIds
from quire.runner.plan import Ints, PromptLogprobRows, StepPlan
from quire.runner.sampling.noise import sample_seed
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
    prompt_rows: list[PromptLogprobRows] = []
    is_masked = False
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        place = -1
        if chunk.is_fed:
            place = drawn_before[chunk.sequence]
            fed_rows.append(end - 1)
            fed_from.append(place)
        if place == -1 or chunk.count > 1:
            known = chunk.sequence.tokens.ids[chunk.start : chunk.end]
            first = end - chunk.count
            token_ids[first : first + len(known)] = known
        if chunk.drafts is not None:
            token_ids[end - len(chunk.drafts) : end] = chunk.drafts
            samples += _rows_of_drafts(chunk, chunk.drafts)
            sample_rows += range(end - chunk.count, end)
        elif chunk.num_samples == 1:
            samples.append(_sample_row(chunk, chunk.sequence.seed, place))
            sample_rows.append(end - 1)
        elif chunk.num_samples:
            samples += _first_samples(chunk)
            sample_rows += [end - 1] * chunk.num_samples
        if chunk.sequence.grammar is not None and chunk.num_samples:
            is_masked = True
        if chunk.judged:
            prompt_rows.append(_prompt_logprob_rows(chunk, end - chunk.count))
    return StepPlan(
        token_ids=token_ids,
        fed_rows=np.array(fed_rows, dtype=np.int32),
        fed_from=np.array(fed_from, dtype=np.int32),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        counts=counts,
        block_tables=_block_tables(chunks),
        samples=samples,
        sample_rows=np.array(sample_rows, dtype=np.int32),
        prompt_logprobs=prompt_rows,
        is_masked=is_masked,
    )


def _drawn(schedule: Schedule) -> dict[Sequence, int]:
    """Which of a step's draws is each sequence's own."""
    place, places = 0, {}
    for chunk in schedule.chunks:
        if chunk.num_samples:
            places[chunk.sequence] = place
            place += chunk.num_samples
    return places


def _first_samples(chunk: Chunk) -> list[SampleRow]:
    """The first token of each of the samples that fork off behind the prompt."""
    request = chunk.sequence.request
    seeds = [sample_seed(request.seed, i) for i in range(chunk.num_samples)]
    return [_sample_row(chunk, seed, fed_from=-1) for seed in seeds]


def _rows_of_drafts(chunk: Chunk, drafts: TokenIds) -> list[SampleRow]:
    """One behind the last token and one behind each draft, as if those before it were right."""
    rows = [_sample_row(chunk, chunk.sequence.seed, -1, i) for i in range(1, chunk.count + 1)]
    if chunk.sequence.params.needs_penalties:
        for i, row in enumerate(rows):
            row.output_ids = np.concatenate([chunk.sequence.output_ids, drafts[:i]])
    return rows


def _sample_row(chunk: Chunk, seed: int, fed_from: int, behind: int | None = None) -> SampleRow:
    """Drawn behind all of the chunk, or so many of its tokens."""
    sequence = chunk.sequence
    params = sequence.params
    # Tokens that were generated before this one.
    position = chunk.start + (behind or chunk.count) - sequence.prompt_len
    row = SampleRow(params, seed, position)
    if sequence.request.search is not None:
        row.num_best = sequence.request.search.num_candidates
    if params.best_of is not None:
        row.want_logprob = params.num_samples > params.n
    if params.needs_penalties:
        row.prompt_ids, row.output_ids = sequence.request.prompt_ids, sequence.output_ids
        row.fed_from = fed_from
    if position < params.min_tokens and sequence.grammar is None:  # a mask says it there
        row.banned = tuple(sequence.request.stop_ids)
    return row


def _prompt_logprob_rows(chunk: Chunk, first_row: int) -> PromptLogprobRows:
    positions, k = chunk.judged, chunk.sequence.params.prompt_logprobs
    assert k is not None
    next_ids = chunk.sequence.request.prompt_ids[positions.start + 1 : positions.stop + 1]
    return PromptLogprobRows(first_row + positions.start - chunk.start, next_ids, k)


def _block_tables(chunks: list[Chunk]) -> Ints:
    tables = [chunk.sequence.table for chunk in chunks]
    width = max(len(table) for table in tables if table is not None)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        assert table is not None
        row[: len(table)] = table.ids
    return padded
