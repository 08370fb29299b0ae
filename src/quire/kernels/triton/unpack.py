"""A step's inputs, one array of the host's memory, laid out where a recorded graph reads them.

    columns | token ids | positions | slots | fed from | query starts | contexts | block tables
      × groups                     × groups                            × groups     × groups

All are int32. There are as many of each as the graph has tokens or sequences; the tables of a KV
group have as many columns as this step needs. A token that is fed from somewhere (not −1) is one
that the last step drew there, and that the host does not know.

The kernel reads pinned memory itself: a copy engine would begin some microseconds after the kernel
ahead has ended, and the kernel behind it some after that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.pdl import pdl_launch, wait_for_previous

_COLUMNS = 128  # copied at once


def unpack(
    packed: Tensor,  # int32, on the host or the device
    drawn: Tensor,  # int64: what the last step drew
    tokens: Tensor,  # int64 [2 + groups, tokens]: ids, positions, slots of each group
    tables: Tensor,  # int32: every group's `[sequences, columns or more]`, in one piece of memory
    table_places: Tensor,  # int64 [groups, 2]: where each one's tables begin there, and its stride
    starts: Tensor,  # int32 [sequences + 1]
    contexts: Tensor,  # int32 [groups, sequences]
) -> None:
    count, (groups, sequences) = tokens.shape[1], contexts.shape
    _unpack[(max(count, sequences + 1),)](
        packed,
        drawn,
        tokens,
        tables,
        table_places,
        starts,
        contexts,
        count,
        sequences,
        tokens.stride(0),
        contexts.stride(0),
        GROUPS=groups,
        COLUMNS=_COLUMNS,
        num_warps=1,
        **pdl_launch(tokens.device),
    )


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "token_stride", "context_stride"],
    do_not_specialize_on_alignment=["drawn"],
)
def _unpack(
    packed,
    drawn,
    tokens,
    tables,
    table_places,
    starts,
    contexts,
    num_tokens,
    num_sequences,
    token_stride,
    context_stride,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each token and each sequence of that number."""
    number = tl.program_id(0)
    token = packed + GROUPS + number
    is_token = number < num_tokens
    token_id = tl.load(token, mask=is_token, other=0).to(tl.int64)
    fed_from = tl.load(token + (2 + GROUPS) * num_tokens, mask=is_token, other=-1)
    wait_for_previous(PDL)  # for what it drew, and before what it may still read is overwritten
    token_id = tl.load(drawn + fed_from, mask=fed_from >= 0, other=token_id)
    tl.store(tokens + number, token_id, mask=is_token)
    for field in tl.static_range(1, 2 + GROUPS):
        value = tl.load(token + field * num_tokens, mask=is_token, other=0).to(tl.int64)
        tl.store(tokens + field * token_stride + number, value, mask=is_token)

    sequence = packed + GROUPS + (3 + GROUPS) * num_tokens + number
    is_sequence = number < num_sequences
    start = tl.load(sequence, mask=number <= num_sequences, other=0)
    tl.store(starts + number, start, mask=number <= num_sequences)
    sequence += num_sequences + 1
    for group in tl.static_range(GROUPS):
        context = tl.load(sequence + group * num_sequences, mask=is_sequence, other=0)
        tl.store(contexts + group * context_stride + number, context, mask=is_sequence)
    if is_sequence:
        source = sequence - number + GROUPS * num_sequences  # the first group's tables
        for group in tl.static_range(GROUPS):
            columns = tl.load(packed + group)
            begin = tl.load(table_places + 2 * group)
            stride = tl.load(table_places + 2 * group + 1)
            own = source + number * columns
            target = tables + begin + number * stride
            for first in range(0, columns, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                block = tl.load(own + column, mask=column < columns, other=0)
                tl.store(target + column, block, mask=column < columns)
            source += num_sequences * columns
