"""From a plan to the tensors of a step, without a Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.runner.plan import Ints, StepPlan
from quire.runner.transfer import BY_COPY_ENGINES, Array, HostLink

NO_SLOT = -1  # a token whose KV is written nowhere
NOT_FED = -1  # a token that the host knows


@dataclass(frozen=True)
class StepInputs:
    ids_positions_slots: Tensor  # int64 [3, tokens]
    batch: AttentionBatch

    @property
    def token_ids(self) -> Tensor:
        return self.ids_positions_slots[0]

    @property
    def positions(self) -> Tensor:
        return self.ids_positions_slots[1]


def step_inputs(
    plan: StepPlan,
    block_size: int,
    device: torch.device,
    drawn: Tensor | None = None,
    link: HostLink = BY_COPY_ENGINES,
) -> StepInputs:
    """`drawn` are the tokens of the step before, on the device, if the plan is fed by it."""
    positions, slots = _positions_and_slots(plan, block_size)
    query_starts = np.zeros(len(plan.counts) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=query_starts[1:])
    contexts = plan.starts + plan.counts
    ids_positions_slots = np.array([plan.token_ids, positions, slots], dtype=np.int64)
    arrays: list[Array] = [ids_positions_slots, plan.block_tables, query_starts, contexts]
    if len(plan.fed_rows):
        arrays += [plan.fed_rows, plan.fed_from]
    tensors = link.all_to_device(arrays, device)
    if len(plan.fed_rows):
        assert drawn is not None
        fed_rows, fed_from = tensors[4:]
        tensors[0][0, fed_rows] = drawn[fed_from]
    batch = AttentionBatch(
        slot_mapping=tensors[0][2],
        block_tables=tensors[1],
        query_starts=tensors[2],
        context_lens=tensors[3],
        query_lens=plan.counts.tolist(),
        contexts=contexts.tolist(),
    )
    return StepInputs(tensors[0], batch)


def packed_size(tokens: int, sequences: int, columns: int) -> int:
    return 1 + 4 * tokens + (sequences + 1) + sequences + sequences * columns


def pack(plan: StepPlan, block_size: int, tokens: int, sequences: int, out: Ints) -> None:
    """The step as `kernels.triton.unpack` takes it, with room for some tokens and sequences.

    Spare sequences have no token, and spare tokens belong to none and write nothing.
    """
    used_tokens, used_sequences = plan.num_tokens, len(plan.counts)
    ids, positions, slots, fed_from = out[1 : 1 + 4 * tokens].reshape(4, tokens)
    rest = out[1 + 4 * tokens :]
    query_starts, contexts = rest[: sequences + 1], rest[sequences + 1 : 2 * sequences + 1]
    tables = rest[2 * sequences + 1 :].reshape(sequences, -1)
    out[0] = tables.shape[1]
    ids[:used_tokens] = plan.token_ids
    positions[:used_tokens], slots[:used_tokens] = _positions_and_slots(plan, block_size)
    fed_from.fill(NOT_FED)
    fed_from[plan.fed_rows] = plan.fed_from
    query_starts[0] = 0
    np.cumsum(plan.counts, out=query_starts[1 : used_sequences + 1])
    np.add(plan.starts, plan.counts, out=contexts[:used_sequences])
    tables[:used_sequences] = plan.block_tables
    ids[used_tokens:] = 0
    positions[used_tokens:] = 0
    slots[used_tokens:] = NO_SLOT
    query_starts[used_sequences + 1 :] = used_tokens
    contexts[used_sequences:] = 0
    tables[used_sequences:] = 0


def _positions_and_slots(plan: StepPlan, block_size: int) -> tuple[Ints, Ints]:
    """Of each token: its place in its sequence, and in the pool."""
    owner, place = np.arange(len(plan.counts)), plan.starts
    if not plan.is_decode:
        owner = np.repeat(owner, plan.counts)
        ends = np.cumsum(plan.counts)
        first = plan.starts - ends + plan.counts
        place = np.arange(plan.num_tokens, dtype=np.int32) + first.astype(np.int32)[owner]
    blocks, offsets = np.divmod(place, block_size)
    return place, plan.block_tables[owner, blocks] * block_size + offsets
