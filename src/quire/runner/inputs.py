"""From a plan to the tensors of a step, without a Python loop over tokens.

Each KV group has tables, slots and an `AttentionBatch` of its own. A table that begins behind
blocks given back describes a shorter sequence, which is all that kernels see of it: attention
depends on how far apart positions are, and keys were rotated before they were stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.runner.plan import GroupTables, Ints, StepPlan
from quire.runner.transfer import BY_COPY_ENGINES, Array, HostLink

NO_SLOT = -1  # a token whose KV is written nowhere
NOT_FED = -1  # a token that the host knows


@dataclass(frozen=True)
class StepInputs:
    ids_positions_slots: Tensor  # int64 [2 + groups, tokens]
    batches: tuple[AttentionBatch, ...]  # one for each KV group
    num_positions: int  # of the longest sequence

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
    places = _token_places(plan, block_size)
    slots = [places.slots(tables) for tables in plan.tables]
    query_starts = np.zeros(len(plan.counts) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=query_starts[1:])
    lengths = plan.starts + plan.counts
    contexts = [_contexts(tables, lengths, block_size) for tables in plan.tables]
    ids_positions_slots = np.array([plan.token_ids, places.positions, *slots], dtype=np.int64)
    arrays: list[Array] = [ids_positions_slots, query_starts]
    for tables, group_contexts in zip(plan.tables, contexts, strict=True):
        arrays += [tables.block_tables, group_contexts]
    if len(plan.fed_rows):
        arrays += [plan.fed_rows, plan.fed_from]
    tensors = link.all_to_device(arrays, device)
    if len(plan.fed_rows):
        assert drawn is not None
        fed_rows, fed_from = tensors[-2:]
        tensors[0][0, fed_rows] = drawn[fed_from]
    query_lens = plan.counts.tolist()
    batches = tuple(
        AttentionBatch(
            slot_mapping=tensors[0][2 + group],
            block_tables=tensors[2 + 2 * group],
            query_starts=tensors[1],
            context_lens=tensors[3 + 2 * group],
            query_lens=query_lens,
            contexts=contexts[group].tolist(),
        )
        for group in range(len(plan.tables))
    )
    return StepInputs(tensors[0], batches, int(lengths.max(initial=0)))


def packed_size(tokens: int, sequences: int, columns: Sequence[int]) -> int:
    """`columns` are the widths of the groups' tables."""
    groups = len(columns)
    per_sequence = groups + sum(columns)
    return groups + (3 + groups) * tokens + (sequences + 1) + per_sequence * sequences


def pack(plan: StepPlan, block_size: int, tokens: int, sequences: int, out: Ints) -> None:
    """The step as `kernels.triton.unpack` takes it, with room for some tokens and sequences.

    Spare sequences have no token, and spare tokens belong to none and write nothing.
    """
    groups, used_tokens, used_sequences = len(plan.tables), plan.num_tokens, len(plan.counts)
    places = _token_places(plan, block_size)
    at = groups + (3 + groups) * tokens
    per_token = out[groups:at].reshape(3 + groups, tokens)  # ids, positions, slots …, fed from
    query_starts = out[at : at + sequences + 1]
    at += sequences + 1
    contexts = out[at : at + groups * sequences].reshape(groups, sequences)
    at += contexts.size
    per_token[0, :used_tokens] = plan.token_ids
    per_token[1, :used_tokens] = places.positions
    per_token[:2, used_tokens:] = 0
    per_token[2:-1, used_tokens:] = NO_SLOT
    fed_from = per_token[-1]
    fed_from.fill(NOT_FED)
    fed_from[plan.fed_rows] = plan.fed_from
    query_starts[0] = 0
    np.cumsum(plan.counts, out=query_starts[1 : used_sequences + 1])
    query_starts[used_sequences + 1 :] = used_tokens
    contexts[:, used_sequences:] = 0
    for group, tables in enumerate(plan.tables):
        columns = out[group] = tables.block_tables.shape[1]
        per_token[2 + group, :used_tokens] = places.slots(tables)
        lengths = contexts[group, :used_sequences]
        np.add(plan.starts, plan.counts, out=lengths)
        if tables.firsts is not None:
            lengths -= tables.firsts * block_size
        rows = out[at : at + sequences * columns].reshape(sequences, columns)
        rows[:used_sequences] = tables.block_tables
        rows[used_sequences:] = 0
        at += rows.size


class _TokenPlaces(NamedTuple):
    """Where each token of a step stands: in which sequence, at which position and block of it."""

    owners: Array
    positions: Ints
    blocks: Ints
    offsets: Ints
    block_size: int

    def slots(self, tables: GroupTables) -> Ints:
        """Each token's place in the pool, in one group."""
        columns = self.blocks
        if tables.firsts is not None:
            columns = columns - tables.firsts[self.owners]
        return tables.block_tables[self.owners, columns] * self.block_size + self.offsets


def _token_places(plan: StepPlan, block_size: int) -> _TokenPlaces:
    owners, positions = np.arange(len(plan.counts)), plan.starts
    if not plan.is_decode:
        owners = np.repeat(owners, plan.counts)
        ends = np.cumsum(plan.counts)
        first = plan.starts - ends + plan.counts
        positions = np.arange(plan.num_tokens, dtype=np.int32) + first.astype(np.int32)[owners]
    return _TokenPlaces(owners, positions, *np.divmod(positions, block_size), block_size)


def _contexts(tables: GroupTables, lengths: Ints, block_size: int) -> Ints:
    """How much of each sequence its table describes."""
    return lengths if tables.firsts is None else lengths - tables.firsts * block_size
