"""The CPU's kernels: what each is given, and where in `code/` it is."""

from __future__ import annotations

from typing import NamedTuple

from quire.kernels.gguf_blocks import CODES, HALVES, TYPES
from quire.kernels.numba.kernel import Kernel
from quire.kernels.numba.source import (
    Bytes,
    Count,
    Elements,
    Floats,
    Int32s,
    Int64s,
    Kind,
    Real,
)


class NormArguments(NamedTuple):
    next: Count
    rows: Count
    size: Count
    stream: Elements  # [rows, size]
    delta: Elements
    has_delta: Count
    weight: Elements  # [size]
    out: Elements  # [rows, size]
    eps: Real


class GateArguments(NamedTuple):
    next: Count
    rows: Count
    features: Count
    gate_up: Elements  # [rows, 2 * features]
    out: Elements  # [rows, features]


class RotateArguments(NamedTuple):
    next: Count
    tokens: Count
    heads: Count
    block_stride: Count  # numbers from one block to the next
    kv_heads: Count
    block_size: Count
    k_width: Count
    v_width: Count
    qkv: Elements  # [tokens, heads of q, k and v after each other]
    cos: Elements
    sin: Elements
    turn_stride: Count  # numbers from one token's cosines to the next's
    weight: Elements  # [heads + kv_heads, k_width]
    has_weight: Count
    slots: Int64s
    q: Elements  # [tokens, heads, k_width]
    k: Elements  # the layer's own in the first block
    v: Elements
    eps: Real


class AttentionArguments(NamedTuple):
    next_split: Count
    next_thread: Count
    splits: Int32s  # how many; of each: row, sequence, begin, end, the row's first, its splits
    finished: Int64s  # [splits]: by the first split of each row; zeros, before and after
    q: Elements  # [rows, heads, k_width]
    out: Elements  # [rows, heads, v_width]
    k: Elements  # the layer's own in the first block
    v: Elements
    tables: Int32s
    table_width: Count
    heads: Count
    block_stride: Count  # numbers from one block to the next
    kv_heads: Count
    block_size: Count
    k_width: Count
    v_width: Count
    results: Floats  # [splits, heads, v_width + 2]
    scratch: Floats  # [threads, heads, k_width + SPLIT]
    sinks: Floats  # [heads]
    has_sinks: Count
    softcap: Real
    has_softcap: Count
    scale: Real


class PromptArguments(NamedTuple):
    next_group: Count
    groups_done: Count
    next_item: Count
    next_thread: Count
    q: Floats  # [rows, heads, k_width]: of one sequence
    out: Floats  # [rows, heads, v_width]
    k: Floats  # the layer's own in the first block
    v: Floats
    table: Int32s
    query_len: Count
    context: Count
    window: Count  # tokens that a row sees, itself among them; all, where there is no window
    oldest: Count  # the first token that any row sees
    start: Count  # of the chunk that it is in
    groups: Count  # of sixteen tokens from there on
    heads: Count
    block_stride: Count  # numbers from one block to the next
    kv_heads: Count
    block_size: Count
    k_width: Count
    v_width: Count
    keys: Floats  # [kv_heads, groups, k_width, 16]: room for K
    values: Floats  # [kv_heads, v_width / 16, 16 * groups, 16]: room for V
    scratch: Floats  # of each thread
    sinks: Floats  # [heads]
    has_sinks: Count
    softcap: Real
    has_softcap: Count
    scale: Real


class GroupedArguments(NamedTuple):
    next: Count
    groups: Int64s  # [groups, 3]: an expert, its first token, how many it has
    num_groups: Count
    rows: Count  # of each matrix
    size: Count
    weights: Elements  # [experts, rows, size]
    x: Elements  # [tokens, size]
    out: Elements  # [tokens, rows]


class FloatProductArguments(NamedTuple):
    next: Count
    runs: Int64s  # how many; of each: a matrix, its first token, and where its tokens end
    has_runs: Count  # without them all tokens go through the one matrix
    tokens: Count
    groups: Count  # of sixteen rows of a matrix; with a gate, those of the gate
    steps_at_once: Count  # each of which is two groups
    x: Floats  # [tokens, size]
    weights: Floats  # [matrices, groups, size, 16]
    matrix_size: Count  # numbers of a matrix
    size: Count  # numbers of a token
    bias: Floats
    has_bias: Count
    is_gated: Count
    is_large: Count  # what is stored: nobody would find it in a cache
    out: Floats
    width: Count  # of a row of `out`


class RouteArguments(NamedTuple):
    next: Count
    tokens: Count
    experts: Count
    top_k: Count
    size: Count
    x: Floats  # [tokens, size]
    weight: Floats  # [experts, size]
    bias: Floats  # [experts]
    has_bias: Count
    correction: Floats  # [experts]: added for the choice alone
    has_correction: Count
    is_softmax: Count
    is_sigmoid: Count
    is_renormalised: Count
    scale: Real
    slots: Int64s  # [tokens]: negative where a token only pads the step
    scores: Floats  # [tokens, 2 * room]: room for them, and for them corrected
    room: Count
    chosen: Int64s  # [tokens, top_k]
    weights: Floats  # [tokens, top_k]


class SortArguments(NamedTuple):
    next: Count
    pairs: Count  # of a token and an expert
    top_k: Count
    experts: Count
    chosen: Int64s  # [pairs]
    runs: Int64s  # [1 + 3 * experts]: as `FloatProductArguments` has them
    starts: Int64s  # [experts]: room
    places: Int64s  # [pairs]: where each is when they are sorted by expert; -1: nowhere
    size: Count
    x: Floats  # [tokens, size]
    rows: Floats  # [pairs, size]: of `x`, sorted


class CombineArguments(NamedTuple):
    next: Count
    tokens: Count
    top_k: Count
    size: Count
    weights: Floats  # [tokens, top_k]
    places: Int64s  # [tokens, top_k]
    found: Floats  # [pairs, size], sorted by expert
    out: Floats  # [tokens, size]


class AdapterArguments(NamedTuple):
    next_ranks: Count
    ranks_done: Count
    next_features: Count
    tiles: Int32s  # [3, num_tiles]: a slot or -1, where its rows begin and end in `order`
    num_tiles: Count
    order: Int32s  # [rows]
    starts: Int32s  # of each slot: where the rows of `a` of each output begin, and the last end
    starts_stride: Count  # numbers from one slot to the next
    is_biased: Int32s  # of each slot: 0 or 1
    biased_stride: Count
    columns: Int32s  # [outputs + 1]: where the features of each output begin
    outputs: Count
    experts: Count  # of a slot
    inputs: Count
    features: Count
    ranks: Count  # of all outputs
    most_rank: Count
    a: Elements  # [slots * experts, ranks, inputs]
    b: Elements  # [slots * experts, most_rank, features]
    bias: Elements  # [slots * experts, features]
    x: Elements
    x_stride: Count
    hidden: Floats  # [rows, ranks]: room for `a x`
    out: Elements
    out_stride: Count


class ReplayArguments(NamedTuple):
    arrived: Count
    launches: Count
    calls: Int64s  # [launches, 2]: a kernel's address and that of its arguments
    team_size: Count  # the address of a function that tells it; 0: this thread is alone
    give_way: Count  # the address of what lets another thread have this core


class ProductArguments(NamedTuple):
    next_tile: Count
    tiles_done: Count
    next_item: Count
    tokens: Count
    groups: Count  # of sixteen rows; with a gate, those of the gate
    groups_at_once: Count
    x: Floats  # [tokens, size]
    tiles: Bytes  # room for activations' codes
    bias: Floats
    has_bias: Count
    is_gated: Count
    is_large: Count  # what is stored: nobody would find it in a cache
    out: Floats
    width: Count  # of a row of `out`
    size: Count  # activations of a token
    blocks: Count  # of a row
    weights: Bytes
    group_bytes: Count
    scales_apart: Floats  # that do not lie in blocks: of each group, for each of so many blocks
    group_scales: Count  # numbers of a group
    scale_stride: Count  # numbers from one to the next
    blocks_of_scale: Count
    kind: Kind


norm_kernel = Kernel("token_ops.add_and_normalise", NormArguments)
silu_kernel = Kernel("token_ops.silu_and_multiply", GateArguments)
gelu_kernel = Kernel("token_ops.gelu_and_multiply", GateArguments)
rotate_kernel = Kernel("token_ops.rotate_and_write", RotateArguments)
# For weights in float32 beside tensors of a smaller type.
wide_norm_kernel = Kernel("token_ops.add_and_normalise", NormArguments, weight=Floats)
wide_rotate_kernel = Kernel("token_ops.rotate_and_write", RotateArguments, weight=Floats)
attention_kernel = Kernel("attention.attend", AttentionArguments)
prompt_kernel = Kernel("prompt_attention.attend", PromptArguments)
grouped_kernel = Kernel("grouped_linear.multiply", GroupedArguments)
float_product_kernel = Kernel("float_linear.multiply", FloatProductArguments)
route_kernel = Kernel("experts.route", RouteArguments)
sort_kernel = Kernel("experts.sort", SortArguments)
combine_kernel = Kernel("experts.combine", CombineArguments)
adapter_kernel = Kernel("adapters.add", AdapterArguments)
replay_kernel = Kernel("replay.replay", ReplayArguments)

_COARSE = [kind.coarse_name for kind in (TYPES | CODES).values() if kind.has_codes]
# Products with GGUF's types, and with codes whose scales lie apart, by the types' names; those of
# codes with activations of eight bits, too.
product_kernels = {
    name: Kernel(
        "half_linear.multiply" if name in HALVES else "gguf.multiply.multiply",
        ProductArguments,
        kind=name,
    )
    for name in (*TYPES, *CODES, *_COARSE)
}
