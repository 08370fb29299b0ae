"""From a plan to the tensors of a step, without a Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.runner.plan import StepPlan
from quire.runner.transfer import Array, all_to_device

NO_SLOT = -1  # a token whose KV is written nowhere


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
    pad_to: tuple[int, int] | None = None,
) -> StepInputs:
    """`drawn` are the tokens of the step before, on the device, if the plan is fed by it.

    Padded to some tokens and sequences: spare sequences have no token, and spare tokens belong to
    none and write nothing.
    """
    tokens, sequences = plan.num_tokens, len(plan.counts)
    all_tokens, all_sequences = pad_to or (tokens, sequences)
    counts = np.zeros(all_sequences, dtype=np.int32)
    counts[:sequences] = plan.counts
    query_starts = np.zeros(all_sequences + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    contexts = np.zeros(all_sequences, dtype=np.int32)
    np.add(plan.starts, plan.counts, out=contexts[:sequences])
    block_tables = plan.block_tables
    if all_sequences > sequences:
        block_tables = np.zeros((all_sequences, block_tables.shape[1]), dtype=np.int32)
        block_tables[:sequences] = plan.block_tables

    owner = np.arange(sequences)  # the sequence of each token
    place = plan.starts.astype(np.int64)  # the token's position in it
    if not plan.is_decode:
        owner = np.repeat(owner, plan.counts)
        place = np.arange(tokens) + (plan.starts - query_starts[:sequences])[owner]
    ids_positions_slots = np.zeros((3, all_tokens), dtype=np.int64)
    ids_positions_slots[0, :tokens] = plan.token_ids
    ids_positions_slots[1, :tokens] = place
    ids_positions_slots[2] = NO_SLOT
    blocks = plan.block_tables[owner, place // block_size]
    ids_positions_slots[2, :tokens] = blocks.astype(np.int64) * block_size + place % block_size
    arrays: list[Array] = [ids_positions_slots, block_tables, query_starts, contexts]
    if len(plan.fed_rows):
        arrays += [plan.fed_rows, plan.fed_from]
    tensors = all_to_device(arrays, device)
    if len(plan.fed_rows):
        assert drawn is not None
        fed_rows, fed_from = tensors[4:]
        tensors[0][0, fed_rows] = drawn[fed_from]
    batch = AttentionBatch(
        slot_mapping=tensors[0][2],
        block_tables=tensors[1],
        query_starts=tensors[2],
        context_lens=tensors[3],
        query_lens=counts.tolist(),
        contexts=contexts.tolist(),
    )
    return StepInputs(tensors[0], batch)
