"""A step's inputs, sent as one array, laid out where a recorded graph reads them.

    columns | token ids | positions | slots | fed from | query starts | contexts | block tables

All are int32. There are as many of each as the graph has tokens or sequences; tables have as many
columns as this step needs. A token that is fed from somewhere (not −1) is one that the last step
drew there, and that the host does not know.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 128  # copied at once


def unpack(
    packed: Tensor,
    drawn: Tensor,
    tokens: Tensor,  # int64 [3, tokens]: ids, positions, slots
    tables: Tensor,  # int32 [sequences, columns or more]
    starts: Tensor,  # int32 [sequences + 1]
    contexts: Tensor,  # int32 [sequences]
) -> None:
    count, sequences = tokens.shape[1], len(contexts)
    _unpack[(max(count, sequences + 1),)](
        packed,
        drawn,
        tokens,
        tables,
        starts,
        contexts,
        count,
        sequences,
        tokens.stride(0),
        tables.stride(0),
        COLUMNS=_COLUMNS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "token_stride", "table_stride"])
def _unpack(
    packed,
    drawn,
    tokens,
    tables,
    starts,
    contexts,
    num_tokens,
    num_sequences,
    token_stride,
    table_stride,
    COLUMNS: tl.constexpr,
):
    """One program for each token and each sequence of that number."""
    number = tl.program_id(0)
    columns = tl.load(packed)
    token = packed + 1 + number
    is_token = number < num_tokens
    token_id = tl.load(token, mask=is_token, other=0).to(tl.int64)
    fed_from = tl.load(token + 3 * num_tokens, mask=is_token, other=-1)
    token_id = tl.load(drawn + fed_from, mask=fed_from >= 0, other=token_id)
    tl.store(tokens + number, token_id, mask=is_token)
    for field in tl.static_range(1, 3):
        value = tl.load(token + field * num_tokens, mask=is_token, other=0).to(tl.int64)
        tl.store(tokens + field * token_stride + number, value, mask=is_token)

    sequence = packed + 1 + 4 * num_tokens + number
    is_sequence = number < num_sequences
    start = tl.load(sequence, mask=number <= num_sequences, other=0)
    tl.store(starts + number, start, mask=number <= num_sequences)
    sequence += num_sequences + 1
    context = tl.load(sequence, mask=is_sequence, other=0)
    tl.store(contexts + number, context, mask=is_sequence)
    if is_sequence:
        source = packed + 2 + 4 * num_tokens + 2 * num_sequences + number * columns
        target = tables + number.to(tl.int64) * table_stride
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            block = tl.load(source + column, mask=column < columns, other=0)
            tl.store(target + column, block, mask=column < columns)
