"""Candidates for adapters of long runs."""
import torch
import triton
import triton.language as tl


@triton.jit
def rows_of(number, ROWS: tl.constexpr):
    return ((tl.num_programs(1) - 1 - number) * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def _expand(hidden, b, out, hidden_stride, out_stride, rows, columns, most, features,
            OUTPUTS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
            FEATURES: tl.constexpr):
    """`columns` int32 [2, OUTPUTS + 1]: where features begin, where ranks begin."""
    row = rows_of(tl.program_id(1), ROWS)
    block = tl.program_id(0)
    output = tl.zeros((), tl.int32)
    for i in tl.static_range(1, OUTPUTS):
        output += (block >= tl.load(columns + i) // FEATURES + i).to(tl.int32)
    begin = tl.multiple_of(tl.load(columns + output), 16)
    last = tl.multiple_of(tl.load(columns + output + 1), 16)
    start = tl.load(columns + OUTPUTS + 1 + output)
    rank = tl.load(columns + OUTPUTS + 2 + output) - start
    feature = begin + (block - begin // FEATURES - output) * FEATURES + tl.arange(0, FEATURES)
    is_own = feature < last
    live = row < rows
    mask = live[:, None] & is_own[None, :]
    at = out + row[:, None] * out_stride + feature[None, :]
    if ADD:
        before = tl.load(at, mask=mask, other=0.0)
    lane = tl.arange(0, RANKS)
    s = tl.load(hidden + (row * hidden_stride + start)[:, None] + lane[None, :],
                mask=live[:, None] & (lane < rank)[None, :], other=0.0)
    w = tl.load(b + lane[:, None] * features + feature[None, :],
                mask=(lane < rank)[:, None] & is_own[None, :], other=0.0)
    found = tl.dot(s, w)
    if ADD:
        found += before.to(tl.float32)
    tl.store(at, found.to(out.dtype.element_ty), mask=mask)


def expand(hidden, b, out, columns, outputs, add, ROWS=64, FEATURES=128, warps=4):
    rows, features = out.shape
    blocks = features // FEATURES + outputs - (1 if outputs == 1 and features % FEATURES == 0 else 0)
    _expand[blocks, triton.cdiv(rows, ROWS)](
        hidden, b, out, hidden.stride(0), out.stride(0), rows, columns, b.shape[0], b.shape[1],
        OUTPUTS=outputs, ADD=add, ROWS=ROWS, RANKS=16, FEATURES=FEATURES, num_warps=warps)


@triton.jit(do_not_specialize=["rows"])
def _shrink(x, a, out, x_stride, rows, columns, ranks, wide, ROWS: tl.constexpr,
            RANKS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    row = rows_of(tl.program_id(1), ROWS)
    part = tl.program_id(0)
    live = row < rows
    rank, lane = tl.arange(0, RANKS), tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for column in tl.range(part * wide, min(part * wide + wide, columns), COLUMNS, num_stages=STAGES):
        at = column + lane
        numbers = tl.load(x + row[:, None] * x_stride + at[None, :],
                          mask=live[:, None] & (at < columns)[None, :], other=0.0)
        weights = tl.load(a + rank[None, :] * columns + at[:, None],
                          mask=(rank < ranks)[None, :] & (at < columns)[:, None], other=0.0)
        sums = tl.dot(numbers, weights, sums)
    to = out + (part.to(tl.int64) * rows + row)[:, None] * ranks + rank[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=live[:, None] & (rank < ranks)[None, :])


def shrink(x, a, ROWS=64, COLUMNS=128, STAGES=4, parts=1, warps=4):
    rows, columns = x.shape
    ranks = len(a)
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(parts, rows, ranks, dtype=dtype, device=x.device)
    wide = triton.cdiv(triton.cdiv(columns, COLUMNS), parts) * COLUMNS
    _shrink[parts, triton.cdiv(rows, ROWS)](
        x, a, out, x.stride(0), rows, columns, ranks, wide, ROWS=ROWS,
        RANKS=max(16, triton.next_power_of_2(ranks)), COLUMNS=COLUMNS, STAGES=STAGES, num_warps=warps)
    return out[0] if parts == 1 else out.sum(0).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "gate_rank", "up_rank", "down_rank"])
def _gate(hidden, b, product, out, a, sums_out, hidden_stride, product_stride, out_stride, rows,
          gate_rank, up_rank, down_rank, size, wide, SHRINK: tl.constexpr, ROWS: tl.constexpr,
          RANKS: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    part = tl.program_id(0)
    row = rows_of(tl.program_id(1), ROWS)
    live = row < rows
    lane = tl.arange(0, RANKS)
    source = hidden + (row * hidden_stride)[:, None] + lane[None, :]
    gate_hidden = tl.load(source, mask=live[:, None] & (lane < gate_rank)[None, :], other=0.0)
    up_hidden = tl.load(source + gate_rank, mask=live[:, None] & (lane < up_rank)[None, :], other=0.0)
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    own = b + lane[:, None] * (2 * size)
    for first in tl.range(part * wide, min(part * wide + wide, size), FEATURES, num_stages=STAGES):
        feature = first + tl.arange(0, FEATURES)
        is_own = feature < size
        mask = live[:, None] & is_own[None, :]
        at = product + row[:, None] * product_stride + feature[None, :]
        gate_before = tl.load(at, mask=mask, other=0.0)
        up_before = tl.load(at + size, mask=mask, other=0.0)
        gate_weights = tl.load(own + feature[None, :], mask=(lane < gate_rank)[:, None] & is_own[None, :], other=0.0)
        up_weights = tl.load(own + size + feature[None, :], mask=(lane < up_rank)[:, None] & is_own[None, :], other=0.0)
        gate = tl.dot(gate_hidden, gate_weights) + gate_before.to(tl.float32)
        up = tl.dot(up_hidden, up_weights) + up_before.to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        result = ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)
        tl.store(out + row[:, None] * out_stride + feature[None, :], result, mask=mask)
        if SHRINK:
            down = tl.load(a + lane[None, :] * size + feature[:, None],
                           mask=(lane < down_rank)[None, :] & is_own[:, None], other=0.0)
            sums = tl.dot(result, down, sums)
    if SHRINK:
        to = sums_out + (part.to(tl.int64) * rows + row)[:, None] * RANKS + lane[None, :]
        tl.store(to, sums, mask=live[:, None])


def gate(hidden, b, product, a, parts=8, ROWS=64, FEATURES=64, STAGES=1, warps=4, fuse=True):
    rows, size = len(product), product.shape[1] // 2
    out = torch.empty(rows, size, dtype=product.dtype, device=product.device)
    sums = torch.empty(parts, rows, 16, dtype=torch.float32, device=product.device)
    wide = triton.cdiv(triton.cdiv(size, FEATURES), parts) * FEATURES
    _gate[parts, triton.cdiv(rows, ROWS)](
        hidden, b, product, out, a, sums, hidden.stride(0), product.stride(0), out.stride(0), rows,
        16, 16, 16, size, wide, SHRINK=fuse, ROWS=ROWS, RANKS=16, FEATURES=FEATURES, STAGES=STAGES,
        num_warps=warps)
    return (out, sums.sum(0).to(product.dtype)) if fuse else (out, None)
