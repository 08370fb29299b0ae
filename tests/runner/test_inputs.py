"""A step's tensors: as a slow loop makes them, and the same when they travel in one piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from quire.kernels.triton.unpack import unpack
from quire.runner.inputs import NO_SLOT, StepInputs, pack, packed_size, step_inputs
from quire.runner.plan import GroupTables, StepPlan, empty_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BLOCK_SIZE = 4
WIDEST = 200  # columns of the tables that a graph reads
DRAWN = torch.arange(5000, 5009, device=DEVICE)


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    """One to three groups; sequences may have given back any blocks before their new tokens."""
    count = draw(st.integers(1, 5))
    most_new = draw(st.sampled_from([1, 6]))
    counts = np.array(draw(st.lists(st.integers(1, most_new), min_size=count, max_size=count)))
    starts = np.array(draw(st.lists(st.integers(0, 700), min_size=count, max_size=count)))
    dice = np.random.default_rng(draw(st.integers(0, 99)))
    needed = (starts + counts - 1) // BLOCK_SIZE + 1
    tables = []
    for is_window in draw(st.lists(st.booleans(), min_size=1, max_size=3)):
        firsts = dice.integers(0, starts // BLOCK_SIZE + 1) if is_window else np.zeros(count)
        held = (needed - firsts).astype(int)
        ids = [dice.integers(0, 10_000, each).astype(np.int32) for each in held]
        tables.append(GroupTables.of(ids, firsts.astype(int).tolist()))
    fed = [i for i in range(count) if draw(st.booleans())]
    return StepPlan(
        token_ids=dice.integers(0, 1000, counts.sum()).astype(np.int32),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        tables=tuple(tables),
        samples=[],
        sample_rows=np.empty(0, dtype=np.int32),
        fed_rows=(np.cumsum(counts)[fed] - 1).astype(np.int32),
        fed_from=dice.permutation(9)[: len(fed)].astype(np.int32),
    )


def slots_one_by_one(plan: StepPlan, tables: GroupTables) -> list[int]:
    slots = []
    for sequence, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        first = 0 if tables.firsts is None else int(tables.firsts[sequence])
        for position in range(int(start), int(start + count)):
            block = tables.block_tables[sequence, position // BLOCK_SIZE - first]
            slots.append(int(block) * BLOCK_SIZE + position % BLOCK_SIZE)
    return slots


@settings(max_examples=examples(60), deadline=None)
@given(plan=steps())
def test_every_group_has_its_slots_and_lengths(plan: StepPlan) -> None:
    inputs = step_inputs(plan, BLOCK_SIZE, DEVICE, DRAWN)
    positions = [
        p for s, n in zip(plan.starts, plan.counts, strict=True) for p in range(int(s), int(s + n))
    ]
    assert inputs.positions.tolist() == positions
    assert inputs.num_positions == max(positions) + 1
    ids = plan.token_ids.tolist()
    for row, place in zip(plan.fed_rows, plan.fed_from, strict=True):
        ids[row] = 5000 + int(place)
    assert inputs.token_ids.tolist() == ids
    assert len(inputs.batches) == len(plan.tables)
    for batch, tables in zip(inputs.batches, plan.tables, strict=True):
        assert batch.slot_mapping.tolist() == slots_one_by_one(plan, tables)
        assert batch.block_tables.tolist() == tables.block_tables.tolist()
        firsts = np.zeros(len(plan.starts), int) if tables.firsts is None else tables.firsts
        lengths = (plan.starts + plan.counts - BLOCK_SIZE * firsts).tolist()
        assert batch.contexts == batch.context_lens.tolist() == lengths
        assert batch.query_lens == plan.counts.tolist()
        assert batch.query_starts.tolist() == [0, *np.cumsum(plan.counts).tolist()]


def laid_out(plan: StepPlan, tokens: int, sequences: int):
    """What a graph of that size reads, among rests of other steps."""
    groups = len(plan.tables)
    columns = [tables.block_tables.shape[1] for tables in plan.tables]
    packed = np.full(packed_size(tokens, sequences, columns) + 7, 77, dtype=np.int32)
    pack(plan, BLOCK_SIZE, tokens, sequences, packed[:-7])
    widths = [WIDEST + 3 * group for group in range(groups)]
    begins = [sequences * sum(widths[:group]) for group in range(groups)]
    places = torch.tensor(list(zip(begins, widths, strict=True)), device=DEVICE)
    got = torch.full((2 + groups, tokens), -9, dtype=torch.int64, device=DEVICE)
    tables = torch.full((sequences * sum(widths),), -9, dtype=torch.int32, device=DEVICE)
    starts = torch.full((sequences + 1,), -9, dtype=torch.int32, device=DEVICE)
    contexts = torch.full((groups, sequences + 5), -9, dtype=torch.int32, device=DEVICE)
    used = contexts[:, :sequences]
    unpack(torch.from_numpy(packed).to(DEVICE), DRAWN, got, tables, places, starts, used)
    assert (contexts[:, sequences:] == -9).all()
    by_group = [
        each.view(sequences, width)
        for each, width in zip(tables.split([sequences * w for w in widths]), widths, strict=True)
    ]
    return got, by_group, starts, used


@settings(max_examples=40, deadline=None)
@given(plan=steps(), spare_tokens=st.integers(0, 3), spare_sequences=st.integers(0, 3))
def test_in_one_piece_or_in_parts(plan: StepPlan, spare_tokens: int, spare_sequences: int) -> None:
    parts: StepInputs = step_inputs(plan, BLOCK_SIZE, DEVICE, DRAWN)
    tokens, sequences = plan.num_tokens + spare_tokens, len(plan.counts) + spare_sequences
    got, by_group, starts, contexts = laid_out(plan, tokens, sequences)
    used, rows = plan.num_tokens, len(plan.counts)
    assert torch.equal(got[:, :used], parts.ids_positions_slots)
    assert (got[:2, used:] == 0).all() and (got[2:, used:] == NO_SLOT).all()
    assert (starts[rows:] == used).all()
    for batch, tables, lengths in zip(parts.batches, by_group, contexts, strict=True):
        columns = batch.block_tables.shape[1]
        assert torch.equal(tables[:rows, :columns], batch.block_tables)
        assert (tables[rows:, :columns] == 0).all() and (tables[:, columns:] == -9).all()
        assert torch.equal(starts[: rows + 1], batch.query_starts)
        assert torch.equal(lengths[:rows], batch.context_lens) and (lengths[rows:] == 0).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_a_step_without_sequences_writes_nothing(groups: int) -> None:
    got, _, starts, contexts = laid_out(empty_plan(groups), 5, 3)
    assert (got[2:] == NO_SLOT).all() and (starts == 0).all() and (contexts == 0).all()


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_what_one_group_sends_is_as_large_as_ever(groups: int) -> None:
    """Each further group adds its slots, lengths, table and width, and nothing else."""
    columns = [9, 4, 2][:groups]
    one = 1 + 4 * 32 + (8 + 1) + 8 + 8 * 9
    more = sum(1 + 32 + 8 + 8 * width for width in columns[1:])
    assert packed_size(32, 8, columns) == one + more
