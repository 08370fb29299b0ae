"""Attention of long prompts over expanded latents on Hopper GPUs: which work it has, and whether.

The kernel is that of other long prompts (`attention/hopper.py`), with keys in two parts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.attention.dense import ROWS, cut
from quire.kernels.triton.tried import is_hopper, tried

_NOPE, _ROPE, _VALUES = 128, 64, 128  # the sizes that the kernel has


def expanded_jobs(batch: AttentionBatch, device: torch.device) -> Tensor:
    """`[row of q, tokens, position, row of K]` for every program, longest walks first; the same for
    all layers. Rows of K are those of all sequences, end to end."""
    lengths, contexts = np.array(batch.query_lens), np.array(batch.contexts)
    _, prompt, first, _ = cut(lengths, ROWS)
    row = (np.cumsum(lengths) - lengths)[prompt] + first
    position = (contexts - lengths)[prompt] + first
    count = np.minimum(lengths[prompt] - first, ROWS)
    jobs = np.stack([row, count, position, (np.cumsum(contexts) - contexts)[prompt]], axis=1)
    jobs = jobs[np.argsort(-position, kind="stable")]
    there = torch.from_numpy(jobs.astype(np.int32))
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


def has_hopper_kernel(
    device: torch.device, dtype: torch.dtype, nope: int, rope: int, values: int
) -> bool:
    return (
        dtype in (torch.float16, torch.bfloat16)
        and (nope, rope, values) == (_NOPE, _ROPE, _VALUES)
        and is_hopper(device)
        and _can_be_built(device, dtype)
    )


@tried("Long prompts are")
def _can_be_built(device: torch.device, dtype: torch.dtype) -> None:
    """One token, of itself."""
    from quire.kernels.triton.attention.hopper import attend_expanded

    q = torch.zeros(1, 1, _NOPE + _ROPE, dtype=dtype, device=device)
    kv, k_rope = q.new_zeros(ROWS, 1, _NOPE + _VALUES), q.new_zeros(ROWS, _ROPE)
    jobs = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32, device=device)
    attend_expanded(q, kv, k_rope, jobs, 1.0, q.new_empty(1, 1, _VALUES))
