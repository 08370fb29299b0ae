"""A step that travels in one piece is laid out on the device as one whose parts are sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from quire.kernels.triton.unpack import unpack
from quire.runner.inputs import NO_SLOT, pack, packed_size, step_inputs
from quire.runner.plan import StepPlan, empty_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BLOCK_SIZE = 4
WIDEST = 200  # columns of the tables that a graph reads


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    count = draw(st.integers(1, 5))
    most_new = draw(st.sampled_from([1, 6]))
    counts = np.array(draw(st.lists(st.integers(1, most_new), min_size=count, max_size=count)))
    starts = np.array(draw(st.lists(st.integers(0, 700), min_size=count, max_size=count)))
    dice = np.random.default_rng(draw(st.integers(0, 99)))
    columns = int((starts + counts).max() - 1) // BLOCK_SIZE + 1
    fed = [i for i in range(count) if draw(st.booleans())]
    return StepPlan(
        token_ids=dice.integers(0, 1000, counts.sum()).astype(np.int32),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        block_tables=dice.integers(0, 10_000, (count, columns)).astype(np.int32),
        samples=[],
        sample_rows=np.empty(0, dtype=np.int32),
        fed_rows=(np.cumsum(counts)[fed] - 1).astype(np.int32),
        fed_from=dice.permutation(9)[: len(fed)].astype(np.int32),
    )


def laid_out(plan: StepPlan, drawn: torch.Tensor, tokens: int, sequences: int):
    """What a graph of that size reads, among rests of other steps."""
    columns = plan.block_tables.shape[1]
    packed = np.full(packed_size(tokens, sequences, columns) + 7, 77, dtype=np.int32)
    pack(plan, BLOCK_SIZE, tokens, sequences, packed[:-7])
    found = [
        torch.full((3, tokens), -9, dtype=torch.int64, device=DEVICE),
        torch.full((sequences, WIDEST), -9, dtype=torch.int32, device=DEVICE),
        torch.full((sequences + 1,), -9, dtype=torch.int32, device=DEVICE),
        torch.full((sequences,), -9, dtype=torch.int32, device=DEVICE),
    ]
    unpack(torch.from_numpy(packed).to(DEVICE), drawn, *found)
    return found


@settings(max_examples=40, deadline=None)
@given(plan=steps(), spare_tokens=st.integers(0, 3), spare_sequences=st.integers(0, 3))
def test_in_one_piece_or_in_parts(plan: StepPlan, spare_tokens: int, spare_sequences: int) -> None:
    drawn = torch.arange(5000, 5009, device=DEVICE)
    parts = step_inputs(plan, BLOCK_SIZE, DEVICE, drawn)
    tokens, sequences = plan.num_tokens + spare_tokens, len(plan.counts) + spare_sequences
    got, tables, starts, contexts = laid_out(plan, drawn, tokens, sequences)
    used, rows, columns = plan.num_tokens, *plan.block_tables.shape
    assert torch.equal(got[:, :used], parts.ids_positions_slots)
    assert (got[:2, used:] == 0).all() and (got[2, used:] == NO_SLOT).all()
    assert torch.equal(tables[:rows, :columns], parts.batch.block_tables)
    assert (tables[rows:, :columns] == 0).all() and (tables[:, columns:] == -9).all()
    assert torch.equal(starts[: rows + 1], parts.batch.query_starts)
    assert (starts[rows:] == used).all()
    assert torch.equal(contexts[:rows], parts.batch.context_lens) and (contexts[rows:] == 0).all()


def test_a_step_without_sequences_writes_nothing() -> None:
    got, _, starts, contexts = laid_out(
        empty_plan(), torch.zeros(1, dtype=torch.int64, device=DEVICE), 5, 3
    )
    assert (got[2] == NO_SLOT).all() and (starts == 0).all() and (contexts == 0).all()
