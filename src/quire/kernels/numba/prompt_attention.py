"""The attention of long prompts, by a kernel of its own where that is faster than torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.lent_memory import empty
from quire.kernels.numba.host import has_avx512, is_arm_linux
from quire.kernels.numba.kernels import prompt_kernel
from quire.kernels.numba.sizes import LANES, PROMPT_CHUNK, PROMPT_ROWS
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring

# Torch multiplies rows with tokens that they do not see, too: twice as much. On ARM it does so by
# OpenBLAS, at half of what a Neoverse-N1 can. With AVX2 it is level all the same, and on Apple's
# systems, where kernels have one thread alone, better.
IS_FASTER = is_arm_linux() or has_avx512()


def can_attend(q: Tensor) -> bool:
    return IS_FASTER and q.dtype == torch.float32


def attend(
    q: Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    sequence: int,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """All rows of one sequence, into their places in `out`."""
    heads, threads = q.shape[1], torch.get_num_threads()
    query_len, context = batch.query_lens[sequence], batch.contexts[sequence]
    first_row = int(batch.query_starts[sequence])
    window = context if scoring.window is None else scoring.window
    oldest = max(0, context - query_len - window + 1)
    start = oldest - oldest % PROMPT_CHUNK
    groups = -(-(context - start) // (2 * LANES)) * 2  # taken two at a time
    kv_heads, k_width, v_width = pages.k_shape.kv_heads, pages.k_width, pages.v_width
    keys = empty([kv_heads * groups * LANES * k_width], torch.float32)
    values = empty([kv_heads * groups * LANES * v_width], torch.float32)
    room = PROMPT_ROWS * (k_width + v_width + PROMPT_CHUNK + 2 + 2 * LANES)
    scratch = torch.empty(threads * room)
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    prompt_kernel(
        torch.float32,
        threads,
        0,
        0,
        0,
        0,
        q[first_row].data_ptr(),
        out[first_row].data_ptr(),
        pages.k.data_ptr(),
        pages.v.data_ptr(),
        batch.block_tables[sequence].data_ptr(),
        query_len,
        context,
        window,
        oldest,
        start,
        groups,
        heads,
        *pages.k_shape,
        v_width,
        keys.data_ptr(),
        values.data_ptr(),
        scratch.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        sinks is not None,
        scoring.softcap or 0.0,
        scoring.softcap is not None,
        scoring.scale,
    )
