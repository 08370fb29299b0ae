"""Lab: MXFP4 by fp8 tensor cores; tokens as two e4m3 digits."""
from __future__ import annotations
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait, async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from quire.kernels.triton.experts.gating import gating_of
from old_hopper_copies import passed_on
from quire.kernels.triton.experts.hopper_narrow import _share, _leave
from old_hopper_results import _row_values, _store, _join
from quire.kernels.triton.gluon_names import copy_async, tma_load
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.triton.processors import processors
from quire.kernels.triton.sizes import cdiv

PART, WGS = 32, 4
REGS = 112
BASE0, BASE1 = 0x0A080400, 0x12100E0C  # e5m2 of 0, .5, 1, 1.5 and 2, 3, 4, 6, divided by 2 ** 13
E_MIN = -13

# ---- packing (torch) ----
def pack(codes: Tensor, exps: Tensor):
    """codes uint8 [E, R, C] (C % 256 == 0) e2m1 nibbles; exps int [E, R, C/32] (unbiased).
    -> int8 [E*R, C/2], words int32 [E, C/128, R], row exponents float [E, R]"""
    E, R, C = codes.shape
    c = codes.view(E, R, C // 8, 8).int()
    w = torch.zeros(E, R, C // 8, dtype=torch.int64, device=codes.device)
    for j in range(4):
        a, b = c[..., j].long(), c[..., 4 + j].long()
        w |= (a & 7) << (4 * j)
        w |= (b & 7) << (16 + 4 * j)
        w |= (a >> 3) << (8 * j + 7)
        w |= (b >> 3) << (8 * j + 3)
    w = torch.where(w >= 2**31, w - 2**32, w).int()
    row = exps.amax(2, keepdim=True) - 13
    rel = (exps - row - E_MIN).clamp(0, 26) * 4  # 0 .. 104
    rel = rel.view(E, R, C // 256, 4, 2).to(torch.uint8)  # t, s
    words = rel.permute(0, 2, 4, 1, 3).contiguous().view(torch.int32)  # E, step, s, R, 1
    words = words.reshape(E, C // 128, R).contiguous()
    return w.view(torch.int8).reshape(E * R, C // 2), words, torch.exp2(row[..., 0].float())

def digits(x: Tensor):
    """bf16 [n, C] -> fp8 [n, 2, C] permuted, and scale [n]"""
    n, C = x.shape
    xf = x.float()
    amax = xf.abs().amax(1).clamp(min=1e-20)
    k = torch.floor(torch.log2(amax))
    scale = torch.exp2(k - 7)  # max below 256
    v = xf / scale[:, None]
    hi = v.to(torch.float8_e4m3fn)
    lo = (v - hi.float()).to(torch.float8_e4m3fn)
    both = torch.stack([hi.view(torch.uint8), lo.view(torch.uint8)], 1)  # n,2,C
    # column = 256 st + 64 t + 32 s + 8 i + 4 ab + b  ->  st, s, i, ab, t, b
    both = both.view(n, 2, C // 256, 4, 2, 4, 2, 4).permute(0, 1, 2, 4, 5, 6, 3, 7).reshape(n, 2, C)
    return both.contiguous().view(torch.float8_e4m3fn), scale

def blocked(dig: Tensor, scale: Tensor, table: Tensor, block: int):
    """by block: [blocks * 2 * block, C], scales [blocks * block]"""
    n = table.shape[1]
    out = torch.zeros(n, 2, block, dig.shape[2], dtype=torch.uint8, device=dig.device)
    sc = torch.zeros(n, block, device=dig.device)
    for b, (e, lo, hi) in enumerate(table.t().tolist()):
        if e >= 0:
            out[b, :, : hi - lo] = dig[lo:hi].view(torch.uint8).transpose(0, 1)
            sc[b, : hi - lo] = scale[lo:hi]
    return out.view(n * 2 * block, -1).view(torch.float8_e4m3fn), sc.view(-1)

# ---- kernel ----
def product(x, sx, codes, words, srow, order, table, block, features, activation, bias, steps2):
    gated = activation is not None
    out = torch.empty((len(order), features), dtype=torch.bfloat16, device=x.device)
    units = cdiv(features, PART if gated else 2 * PART)
    number = table.shape[1]
    lx = gl.NVMMASharedLayout.get_default_for([2 * block, 128], gl.float8e4nv)
    lc = gl.NVMMASharedLayout.get_default_for([PART, 128], gl.int8)
    _multiply[(min(processors(x.device), number * units),)](
        TensorDescriptor.from_tensor(x, [2 * block, 128], lx),
        TensorDescriptor.from_tensor(codes, [PART, 128], lc),
        words, srow, sx, out if bias is None else bias, out, order, table,
        number, units, features, steps2,
        GATED=gated, BIASED=bias is not None, **gating_of(activation),
        BLOCK=block, STAGES=stages_of(block), REGISTERS=REGS, num_warps=4, **pdl_launch(x.device),
    )
    return out

def stages_of(block):
    rows = WGS * 2 * PART
    stage = rows * 128 + rows * 8 + 2 * block * 256
    return min(5, ((227 << 10) - rows // 2 * block * 2 - 1024) // stage)

@gluon.jit(do_not_specialize=["most", "units"])
def _multiply(
    inputs, codes, words, srow, sx, bias, out, order, table, most, units, features, groups,
    GATED: gl.constexpr, BIASED: gl.constexpr, GELU: gl.constexpr, CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):
    xs = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 2 * BLOCK, 128], inputs.layout)
    cs = gl.allocate_shared_memory(gl.int8, [8 * STAGES, 32, 128], codes.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ws = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 128], plain)
    flag: gl.constexpr = mbarrier.MBarrierLayout()
    has = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    has_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
    for i in gl.static_range(STAGES):
        mbarrier.init(has.index(i), count=36)
        mbarrier.init(has_x.index(i), count=1)
        mbarrier.init(free.index(i), count=4)
    if PDL:
        gdc_launch_dependents()
    mine, end = _share(table, most, units)
    gl.warp_specialize(
        [
            (_compute, (srow, sx, bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, groups, 0, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES)),
            (_compute, (srow, sx, bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, groups, 1, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES)),
            (_compute, (srow, sx, bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, groups, 2, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES)),
            (_compute, (srow, sx, bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units,
                features, groups, 3, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK, STAGES)),
            (load_rows, (codes, words, table, cs, ws, has, free, mine, end, most, units, features, groups, GATED, STAGES)),
            (load_tokens, (inputs, table, xs, has_x, free, mine, end, most, units, groups, STAGES, BLOCK, PDL)),
        ],
        [4, 4, 4, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, 32, 32],
    )

@gluon.jit
def load_rows(codes, words, table, cs, ws, has, free, mine, end, most, units, features, groups,
              GATED: gl.constexpr, STAGES: gl.constexpr):
    most, units, groups = passed_on(most), passed_on(units), passed_on(groups)
    height = features * 2 if GATED else features
    between = features if GATED else 32
    of_unit: gl.constexpr = 32 if GATED else 64
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [1], [0]))
    steps = (groups + 1) // 2
    step = 0
    before = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            last = gl.minimum(end - before, units)
            of_expert = words + expert.to(gl.int64) * height * groups
            for first in range(gl.maximum(mine - before, 0), last, 4):
                together = gl.minimum(last - first, 4)
                rows = (first + lane // 32) * of_unit + lane % 32
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    for i in gl.static_range(4):
                        if i < together:
                            mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                            top = expert * height + (first + i) * of_unit
                            to = 8 * at + 2 * i
                            tma_load(codes, [top, k * 128], bar, cs.index(to))
                            tma_load(codes, [top + between, k * 128], bar, cs.index(to + 1))
                        else:
                            mbarrier.arrive(bar, count=1)
                    for part in gl.static_range(2):
                        row = part * between + rows
                        live = (lane < 32 * together) & (row < height)
                        for sub in gl.static_range(2):
                            group = gl.minimum(2 * k + sub, groups - 1)
                            to = ws.index(4 * at + 2 * part + sub)
                            copy_async(to, of_expert + group * height + row, mask=live)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    step += 1
            before = passed_on(before + units)

@gluon.jit
def load_tokens(inputs, table, xs, has, free, mine, end, most, units, groups,
                STAGES: gl.constexpr, BLOCK: gl.constexpr, PDL: gl.constexpr):
    most, units, groups = passed_on(most), passed_on(units), passed_on(groups)
    steps = (groups + 1) // 2
    step = 0
    before = 0
    if PDL:
        gdc_wait()
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            last = gl.minimum(end - before, units)
            for _ in range(gl.maximum(mine - before, 0), last, 4):
                for k in range(steps):
                    at = step % STAGES
                    bar = has.index(at)
                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 2 * inputs.block_type.nbytes)
                    for i in gl.static_range(2):
                        tma_load(inputs, [2 * BLOCK * block, k * 256 + i * 128], bar, xs.index(2 * at + i))
                    step += 1
            before = passed_on(before + units)

@gluon.jit
def _compute(
    srow, sx, bias, out, order, table, xs, cs, ws, has, has_x, free, mine, end, most, units, features, groups,
    WARPGROUP: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr, GELU: gl.constexpr,
    CLAMPED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):
    of_unit: gl.constexpr = 32 if GATED else 64
    most, units, groups = passed_on(most), passed_on(units), passed_on(groups)
    steps = (groups + 1) // 2
    step = 0
    before = 0
    for block in range(most):
        expert = gl.load(table + block)
        if expert >= 0:
            last = gl.minimum(end - before, units)
            for first in range(gl.maximum(mine - before, 0), last, 4):
                if first + WARPGROUP < last:
                    total = _sums(xs, cs, ws, has, has_x, free, step, groups, WARPGROUP, BLOCK, STAGES)
                    _finish(total, srow, sx + block * BLOCK, bias, out, order, gl.load(table + most + block),
                        gl.load(table + 2 * most + block), expert, (first + WARPGROUP) * of_unit,
                        features, GATED, BIASED, GELU, CLAMPED, ALPHA, LIMIT, BLOCK)
                else:
                    _leave(has, free, step, steps, STAGES)
                step = passed_on(step + steps)
            before = passed_on(before + units)

_T = "{\n.reg .b32 m, v, a, b;\n"
_UNPACK: gl.constexpr = gl.constexpr(_T + """
and.b32 m, $2, 0x77777777;
prmt.b32 a, $3, $7, m;
lop3.b32 $0, $2, 0x80808080, a, 0xEA;
shr.u32 m, m, 16;
prmt.b32 b, $3, $7, m;
shl.b32 v, $2, 4;
lop3.b32 $1, v, 0x80808080, b, 0xEA;
}""")
_UNPACK_OPS: gl.constexpr = gl.constexpr("=&r,=&r,r,r,r,r,r,r,r,r,r")
_LUT: gl.constexpr = gl.constexpr(_T + """
prmt.b32 m, $8, $8, $12;
add.u32 v, m, 0x12100E0C;
and.b32 m, m, 0xFFFFFF00;
add.u32 m, m, 0x0A080400;
mov.b32 $0, m;
mov.b32 $1, m;
mov.b32 $2, m;
mov.b32 $3, m;
mov.b32 $4, v;
mov.b32 $5, v;
mov.b32 $6, v;
mov.b32 $7, v;
}""")
_LUT_OPS: gl.constexpr = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r")
_SEL: gl.constexpr = gl.constexpr(_T + """
shr.u32 m, $4, 2;
mul.lo.u32 m, m, 0x1111;
mov.b32 $0, m;
mov.b32 $1, m;
mov.b32 $2, m;
mov.b32 $3, m;
}""")
_SEL_OPS: gl.constexpr = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")

@gluon.jit
def _lut(words, sel, piece: gl.constexpr):
    word = words.load(gl.SliceLayout(1, piece))[:, None].broadcast_to([32, 16])
    return gl.inline_asm_elementwise(_LUT, _LUT_OPS, [word, sel], dtype=(gl.int32, gl.int32), is_pure=True, pack=4)

@gluon.jit
def _unpacked(codes, lut):
    return gl.inline_asm_elementwise(_UNPACK, _UNPACK_OPS, [codes, lut[0], lut[1]],
                                     dtype=(gl.float8e5, gl.float8e5), is_pure=True, pack=4)

@gluon.jit
def _left(first, second, lut1, lut2, sums: gl.constexpr):
    a, b = _unpacked(first, lut1)
    c, d = _unpacked(second, lut2)
    k0 = _mixed(a, c)
    k1 = _mixed(b, d)
    both = gl.reshape(gl.permute(gl.join(k0, k1), (0, 2, 1)), [64, 32])
    return gl.convert_layout(both, gl.DotOperandLayout(0, sums, 4), assert_trivial=True)

@gluon.jit
def _mixed(first, second):
    both = gl.join(gl.reshape(first, [4, 8, 16]), gl.reshape(second, [4, 8, 16]))
    return gl.reshape(gl.permute(both, (0, 3, 1, 2)), [64, 16])

@gluon.jit
def _pieces(codes, whole: gl.constexpr):
    """Eight [32, 16] of [32, 128]: sub-major."""
    c = codes.load(whole)
    c = gl.reshape(c, [32, 4, 2, 4, 4])  # t s i b
    c = gl.permute(c, (0, 1, 4, 3, 2))  # t b i s
    s0, s1 = gl.split(c)
    return _four(s0), _four(s1)

@gluon.jit
def _four(c):
    c = gl.reshape(c, [32, 4, 4, 2, 2])
    even, odd = gl.split(c)
    a, c2 = gl.split(even)
    b, d = gl.split(odd)
    return (gl.reshape(a, [32, 16]), gl.reshape(b, [32, 16]), gl.reshape(c2, [32, 16]), gl.reshape(d, [32, 16]))

@gluon.jit
def _sums(xs, cs, ws, has, has_x, free, step, groups, WARPGROUP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK, 32])
    whole: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [32, 128])
    piece: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [32, 16])
    total = gl.zeros([64, 2 * BLOCK], gl.float32, sums)
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, piece))[None, :].broadcast_to([32, 16])
    sel = gl.inline_asm_elementwise(_SEL, _SEL_OPS, [col], dtype=gl.int32, is_pure=True, pack=4)
    for i in range(step, step + groups // 2):
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        f0, f1 = _pieces(cs.index(8 * at + 2 * WARPGROUP), whole)
        g0, g1 = _pieces(cs.index(8 * at + 2 * WARPGROUP + 1), whole)
        lf = _lut(ws.index(4 * at).slice(32 * WARPGROUP, 32, 0), sel, piece)
        lg = _lut(ws.index(4 * at + 2).slice(32 * WARPGROUP, 32, 0), sel, piece)
        a = _left(f0[0], g0[0], lf, lg, sums)
        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)
        total = _mul(a, xs, at, 0, 0, total)
        b = _left(f0[1], g0[1], lf, lg, sums)
        total = _mul(b, xs, at, 0, 1, total)
        c = _left(f0[2], g0[2], lf, lg, sums)
        _hold(a)
        total = _mul(c, xs, at, 0, 2, total)
        d = _left(f0[3], g0[3], lf, lg, sums)
        _hold(b)
        total = _mul(d, xs, at, 0, 3, total)
        lf = _lut(ws.index(4 * at + 1).slice(32 * WARPGROUP, 32, 0), sel, piece)
        lg = _lut(ws.index(4 * at + 3).slice(32 * WARPGROUP, 32, 0), sel, piece)
        a = _left(f1[0], g1[0], lf, lg, sums)
        _hold(c)
        total = _mul(a, xs, at, 1, 0, total)
        b = _left(f1[1], g1[1], lf, lg, sums)
        _hold(d)
        total = _mul(b, xs, at, 1, 1, total)
        c = _left(f1[2], g1[2], lf, lg, sums)
        _hold(a)
        total = _mul(c, xs, at, 1, 2, total)
        d = _left(f1[3], g1[3], lf, lg, sums)
        _hold(b)
        total = _mul(d, xs, at, 1, 3, total)
        total = warpgroup_mma_wait(0, deps=[total])
        _held(c)
        _held(d)
        mbarrier.arrive(free.index(at), count=1)
    for i in range(step + groups // 2, step + (groups + 1) // 2):
        at = i % STAGES
        mbarrier.wait(has.index(at), (i // STAGES) & 1)
        f0, f1 = _pieces(cs.index(8 * at + 2 * WARPGROUP), whole)
        g0, g1 = _pieces(cs.index(8 * at + 2 * WARPGROUP + 1), whole)
        lf = _lut(ws.index(4 * at).slice(32 * WARPGROUP, 32, 0), sel, piece)
        lg = _lut(ws.index(4 * at + 2).slice(32 * WARPGROUP, 32, 0), sel, piece)
        a = _left(f0[0], g0[0], lf, lg, sums)
        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)
        total = _mul(a, xs, at, 0, 0, total)
        b = _left(f0[1], g0[1], lf, lg, sums)
        total = _mul(b, xs, at, 0, 1, total)
        c = _left(f0[2], g0[2], lf, lg, sums)
        _hold(a)
        total = _mul(c, xs, at, 0, 2, total)
        d = _left(f0[3], g0[3], lf, lg, sums)
        _hold(b)
        total = _mul(d, xs, at, 0, 3, total)
        total = warpgroup_mma_wait(0, deps=[total])
        _held(c)
        _held(d)
        mbarrier.arrive(free.index(at), count=1)
    return total

_WAIT: gl.constexpr = gl.constexpr("wgmma.wait_group.sync.aligned 1;\nmov.b32 $0, $4;\nmov.b32 $1, $5;\nmov.b32 $2, $6;\nmov.b32 $3, $7;")
_KEEP: gl.constexpr = gl.constexpr("mov.b32 $0, $4;\nmov.b32 $1, $5;\nmov.b32 $2, $6;\nmov.b32 $3, $7;")

@gluon.jit
def _hold(a):
    gl.inline_asm_elementwise(_WAIT, "=r,=r,=r,=r,r,r,r,r", [a], dtype=gl.int8, is_pure=False, pack=16)

@gluon.jit
def _held(a):
    gl.inline_asm_elementwise(_KEEP, "=r,=r,=r,=r,r,r,r,r", [a], dtype=gl.int8, is_pure=False, pack=16)

@gluon.jit
def _mul(a, xs, at, SUB: gl.constexpr, I: gl.constexpr, total):
    x = xs.index(2 * at + SUB).slice(32 * I, 32, 1).permute((1, 0))
    return warpgroup_mma(a, x, total, is_async=True)

@gluon.jit
def _finish(total, srow, sx, bias, out, order, begin, end, expert, first, features,
    GATED: gl.constexpr, BIASED: gl.constexpr, GELU: gl.constexpr, CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, BLOCK: gl.constexpr):
    dtype: gl.constexpr = out.dtype.element_ty
    hi, lo = gl.split(gl.permute(gl.reshape(total, [64, 2, BLOCK]), (0, 2, 1)))
    both = hi + lo
    of_halves = gl.permute(gl.reshape(both, [4, 2, 8, BLOCK]), (0, 2, 3, 1))
    one, other = gl.split(of_halves)
    one, other = gl.reshape(one, [32, BLOCK]), gl.reshape(other, [32, BLOCK])
    layout: gl.constexpr = one.type.layout
    scale = gl.load(sx + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout)))[None, :]
    between = features if GATED else 32
    row = first + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    height = features * 2 if GATED else features
    sr = srow + expert * height
    limit = features - 32 * (0 if GATED else 1)
    one = one * scale * _row_values(sr, row, features)
    other = other * scale * _row_values(sr + between, row, limit)
    if BIASED:
        of_expert = bias + expert * height
        one += _row_values(of_expert, row, features)
        other += _row_values(of_expert + between, row, limit)
    if GATED:
        result = _join(one, other, dtype, GELU, CLAMPED, ALPHA, LIMIT)
        _store(result, out, order, begin, end, first, features, True, BLOCK, 32)
    else:
        _store(one.to(dtype), out, order, begin, end, first, features, False, BLOCK, 32)
        _store(other.to(dtype), out, order, begin, end, first + 32, features, False, BLOCK, 32)
