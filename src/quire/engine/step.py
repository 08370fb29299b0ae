"""From the scheduler's choice to a plan of plain data."""

from __future__ import annotations

import numpy as np

from quire.engine.scheduler import Chunk, Schedule
from quire.engine.sequence import Sequence
from quire.runner.noise import sample_seed
from quire.runner.plan import Ints, PromptLogprobRows, StepPlan
from quire.runner.sampler import SampleRow


def step_plan(schedule: Schedule) -> StepPlan:
    chunks = schedule.chunks
    counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
    ends = np.cumsum(counts)
    samples: list[SampleRow] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptLogprobRows] = []
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        samples += _sample_rows(chunk)
        sample_rows += [end - 1] * chunk.num_samples
        prompt_rows += _prompt_logprob_rows(chunk, end - chunk.count)
    return StepPlan(
        token_ids=np.concatenate(
            [c.sequence.tokens.ids[c.start : c.start + c.count] for c in chunks]
        ),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        counts=counts,
        block_tables=_block_tables(chunks),
        samples=samples,
        sample_rows=np.array(sample_rows, dtype=np.int32),
        prompt_logprobs=prompt_rows,
    )


def _sample_rows(chunk: Chunk) -> list[SampleRow]:
    sequence = chunk.sequence
    if chunk.num_samples <= 1:
        return [_sample_row(sequence, sequence.seed)] * chunk.num_samples
    seeds = [sample_seed(sequence.request.seed, i) for i in range(chunk.num_samples)]
    return [_sample_row(sequence, seed) for seed in seeds]


def _sample_row(sequence: Sequence, seed: int) -> SampleRow:
    params = sequence.params
    banned = sequence.request.stop_ids if sequence.num_output < params.min_tokens else ()
    return SampleRow(
        params=params,
        seed=seed,
        position=sequence.num_output,
        prompt_ids=sequence.request.prompt_ids if params.needs_penalties else None,
        output_ids=sequence.output_ids if params.needs_penalties else None,
        banned=tuple(banned),
        want_logprob=params.num_samples > params.n,
    )


def _prompt_logprob_rows(chunk: Chunk, first_row: int) -> list[PromptLogprobRows]:
    positions = chunk.prompt_logprob_positions
    k = chunk.sequence.params.prompt_logprobs
    if k is None or not positions:
        return []
    next_ids = chunk.sequence.request.prompt_ids[positions.start + 1 : positions.stop + 1]
    return [PromptLogprobRows(first_row + positions.start - chunk.start, next_ids, k)]


def _block_tables(chunks: list[Chunk]) -> Ints:
    tables = [chunk.sequence.table for chunk in chunks]
    width = max(len(table) for table in tables if table is not None)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        assert table is not None
        row[: len(table)] = table.ids
    return padded
