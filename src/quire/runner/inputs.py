"""From a plan to the tensors of a step, without a Python loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.runner.plan import StepPlan


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    batch: AttentionBatch


def step_inputs(plan: StepPlan, block_size: int, device: torch.device) -> StepInputs:
    query_starts = np.zeros(len(plan.counts) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=query_starts[1:])
    rows = np.repeat(np.arange(len(plan.counts)), plan.counts)  # the sequence of each token
    positions = np.arange(plan.num_tokens) - query_starts[rows] + plan.starts[rows]
    blocks = plan.block_tables[rows, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    contexts = plan.starts + plan.counts
    return StepInputs(
        token_ids=_to_device(plan.token_ids.astype(np.int64), device),
        positions=_to_device(positions, device),
        batch=AttentionBatch(
            slot_mapping=_to_device(slots, device),
            block_tables=_to_device(plan.block_tables, device),
            query_starts=_to_device(query_starts, device),
            context_lens=_to_device(contexts, device),
            query_lens=plan.counts.tolist(),
            contexts=contexts.tolist(),
        ),
    )


def _to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
