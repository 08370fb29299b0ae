"""From a plan to the tensors of a step, without a Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.runner.plan import StepPlan
from quire.runner.transfer import all_to_device

NO_SLOT = -1  # a token whose KV is written nowhere


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    batch: AttentionBatch


def step_inputs(
    plan: StepPlan, block_size: int, device: torch.device, drawn: Tensor, rows: int = 0
) -> StepInputs:
    """`drawn` are the tokens of the step before, on the device.

    Padded to `rows` tokens, each a sequence of its own that has no context and writes nothing.
    """
    extra = max(0, rows - plan.num_tokens)
    counts = np.pad(plan.counts, (0, extra), constant_values=1)
    query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owner = np.repeat(np.arange(len(plan.counts)), plan.counts)  # the sequence of each token
    positions = np.arange(plan.num_tokens) - query_starts[owner] + plan.starts[owner]
    blocks = plan.block_tables[owner, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    contexts = np.pad(plan.starts + plan.counts, (0, extra))
    arrays = [
        np.pad(plan.token_ids.astype(np.int64), (0, extra)),
        np.pad(positions, (0, extra)),
        np.pad(slots, (0, extra), constant_values=NO_SLOT),
        np.pad(plan.block_tables, ((0, extra), (0, 0))),
        query_starts,
        contexts,
    ]
    fed = [plan.fed_rows, plan.fed_from] if len(plan.fed_rows) else []
    tensors = all_to_device([*arrays, *fed], device)
    token_ids, positions_, slot_mapping, block_tables, query_starts_, context_lens = tensors[:6]
    if fed:
        fed_rows, fed_from = tensors[6:]
        token_ids[fed_rows] = drawn[fed_from]
    batch = AttentionBatch(
        slot_mapping,
        block_tables,
        query_starts_,
        context_lens,
        query_lens=counts.tolist(),
        contexts=contexts.tolist(),
    )
    return StepInputs(token_ids, positions_, batch)
