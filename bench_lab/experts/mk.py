"""Variants of hopper_narrow: python mk.py SRC; writes n_V.py, c_V.py, u_V.py here."""
import sys, os, re
src = sys.argv[1] + "/quire/kernels/triton/experts/"
N, C, U = (open(src + f).read() for f in ("hopper_narrow.py", "hopper_narrow_copies.py", "hopper_unpack.py"))
def sub(text, old, new, n=1):
    assert text.count(old) >= 1, (old, text.count(old))
    return text.replace(old, new)
def nox(n, c, u):
    c = sub(c, "                    mbarrier.expect(bar, 4 * inputs.block_type.nbytes)\n", "                    mbarrier.arrive(bar, count=1)\n")
    c = sub(c, "                    for i in gl.static_range(4):\n                        tma_load(inputs, [begin, i * quarter + k * 64], bar, xs.index(4 * at + i))\n", "")
    return n, c, u
def now(n, c, u):
    a = c.index("                    for part in gl.static_range(2):"); b = c.index("                    async_copy.mbarrier_arrive(bar, increment_count=False)")
    return n, c[:a] + c[b:], u
def nomma(n, c, u):
    a = n.index("    x = xs.index(4 * at + 2 * HALF).slice")
    n = n[:a] + '''    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], dtype=gl.bfloat16, is_pure=False, pack=2)
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b], dtype=gl.bfloat16, is_pure=False, pack=2)
    return total
'''
    n = re.sub(r"        (\w, \w) = warpgroup_mma_wait\(2.*\n", "", n)
    n = re.sub(r"        total, a, b, c, d = warpgroup_mma_wait\(0.*\n", "", n)
    return n, c, u
def nounpack(n, c, u):
    a = u.index("    return gl.inline_asm_elementwise(\n        _FIRST_TWO"); b = u.index("@gluon.jit\ndef packed_parts")
    u = u[:a] + "    x = packed[0].to(gl.bfloat16, bitcast=True)\n    return x, x\n\n\n" + u[b:]
    return n, c, u
def n32(n, c, u):
    n = sub(n, "sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])\n    total = gl.zeros([64, BLOCK]", "sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])\n    total = gl.zeros([64, 32]")
    n = sub(n, ".slice(32 * SUB, 32, 1).permute", ".slice(32 * SUB, 32, 1).slice(0, 32, 0).permute")
    n = sub(n, "ALPHA, LIMIT, BLOCK,\n                    )  # fmt: skip", "ALPHA, LIMIT, 32,\n                    )  # fmt: skip")
    return n, c, u
def box(size):
    def f(n, c, u):
        n = sub(n, "_tiles(x, blocks.size, gl.bfloat16)", f"_tiles(x, min({size}, blocks.size), gl.bfloat16)")
        n = sub(n, "                inputs, table, xs, has_x,", f"                inputs, table, xs._reinterpret(gl.bfloat16, [4 * STAGES * (BLOCK // {size}), {size}, 64], inputs.layout), has_x,")
        n = sub(n, "units, quarter, STAGES, PDL,\n            )),", "units, quarter, BLOCK, STAGES, PDL,\n            )),")
        c = sub(c, "units, quarter,\n    STAGES: gl.constexpr,\n    PDL: gl.constexpr,", "units, quarter,\n    BLOCK: gl.constexpr,\n    STAGES: gl.constexpr,\n    PDL: gl.constexpr,")
        c = sub(c, "            begin = gl.load(table + most + block)\n", f"            begin = gl.load(table + most + block)\n            boxes = (gl.load(table + 2 * most + block) - begin + {size - 1}) // {size}\n")
        c = sub(c, "mbarrier.expect(bar, 4 * inputs.block_type.nbytes)", "mbarrier.expect(bar, boxes * (4 * inputs.block_type.nbytes))" if size < 0 else "_expect(bar, boxes, inputs)")
        c = sub(c, "                    for i in gl.static_range(4):\n                        tma_load(inputs, [begin, i * quarter + k * 64], bar, xs.index(4 * at + i))\n",
f'''                    for i in gl.static_range(4):
                        for j in gl.static_range(BLOCK // {size}):
                            if j < boxes:
                                tma_load(inputs, [begin + {size} * j, i * quarter + k * 64], bar, xs.index((4 * at + i) * (BLOCK // {size}) + j))
''')
        c += '''

@gluon.jit
def _expect(bar, boxes, inputs):
    """mbarrier.expect takes a constexpr."""
    full: gl.constexpr = 4 * inputs.block_type.nbytes
    if boxes == 1:
        mbarrier.expect(bar, full)
    elif boxes == 2:
        mbarrier.expect(bar, 2 * full)
    elif boxes == 3:
        mbarrier.expect(bar, 3 * full)
    elif boxes == 4:
        mbarrier.expect(bar, 4 * full)
'''
        return n, c, u
    return f
def two(n, c, u):
    """products of a stage stay under way while the next is unpacked: two stages a turn."""
    a = n.index("    for i in range(step, step + quarter // 64):"); b = n.index("    # One step at most, where")
    body = n[a:b]
    def stage(ind, i, first, last):
        lines = f'''at{i} = (i + {i}) % STAGES
mbarrier.wait(has.index(at{i}), ((i + {i}) // STAGES) & 1)
parts = packed_parts(cs, ws, at{i}, 0, WARPGROUP)
''' + ("" if first else "a, b = warpgroup_mma_wait(2, deps=[a, b])\n") + f'''a, b = left_factors(parts, 0, sums)
mbarrier.wait(has_x.index(at{i}), ((i + {i}) // STAGES) & 1)
total = _multiplied(a, b, xs, at{i}, 0, 0, total)
''' + ("" if first else f"c, d = warpgroup_mma_wait(2, deps=[c, d])\nmbarrier.arrive(free.index(at{i-1}), count=1)\n") + f'''c, d = left_factors(parts, 1, sums)
total = _multiplied(c, d, xs, at{i}, 1, 0, total)
parts = packed_parts(cs, ws, at{i}, 1, WARPGROUP)
a, b = warpgroup_mma_wait(2, deps=[a, b])
a, b = left_factors(parts, 0, sums)
total = _multiplied(a, b, xs, at{i}, 0, 1, total)
c, d = warpgroup_mma_wait(2, deps=[c, d])
c, d = left_factors(parts, 1, sums)
total = _multiplied(c, d, xs, at{i}, 1, 1, total)
''' + (f"total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])\nmbarrier.arrive(free.index(at{i}), count=1)\n" if last else "")
        return "".join(" " * ind + l + "\n" for l in lines.splitlines())
    whole = "    pairs2 = quarter // 128\n    for j in range(pairs2):\n        i = step + 2 * j\n" + stage(8, 0, True, False) + stage(8, 1, False, True)
    one = body.replace("range(step, step + quarter // 64)", "range(step + 2 * pairs2, step + quarter // 64)")
    return n[:a] + whole + one + n[b:], c, u
def noarith(n, c, u):
    return nomma(*nounpack(n, c, u))
def lin(n, c, u):
    """codes in the order in which programs read: [expert][unit][group of 32][64 rows][32]."""
    n = sub(n, "        _tiles(codes.flatten(0, 1), PART, gl.int16),\n", "        TensorDescriptor.from_tensor(codes.view(-1, 32), [128, 32], gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)),\n")
    n = sub(n, "    features = codes.shape[1] // (2 if gated else 1)\n", "    features = codes.shape[1] * (32 if gated else 64)\n")
    n = sub(n, "        codes.shape[2],\n", "        32 * codes.shape[2],\n")
    n = sub(n, "cs = gl.allocate_shared_memory(gl.int16, [8 * STAGES, 32, 64], codes.layout)", "cs = gl.allocate_shared_memory(gl.int16, [4 * STAGES, 128, 32], codes.layout)")
    n = n.replace("packed_parts(cs, ws, at, 0, WARPGROUP)", "packed_parts(cs, ws, at, 0, WARPGROUP, sums)").replace("packed_parts(cs, ws, at, 1, WARPGROUP)", "packed_parts(cs, ws, at, 1, WARPGROUP, sums)")
    n = sub(n, "parts, 0, sums", "parts, 0"); n = sub(n, "parts, 1, sums", "parts, 1")
    a = u.index("@gluon.jit\ndef packed_parts")
    u = u[:a] + """@gluon.jit
def packed_parts(codes, words, stage, SUB: gl.constexpr, WARPGROUP: gl.constexpr, sums: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    at = 4 * stage + WARPGROUP
    return packed_rows(codes.index(at).slice(64 * SUB, 64, 0), words.index(at).slice(64 * SUB, 64, 0), left)


@gluon.jit
def left_factors(parts, HALF: gl.constexpr):
    return numbers(parts, HALF)
"""
    a = c.index("                    for i in gl.static_range(4):\n                        if i < together:"); b = c.index("                    async_copy.mbarrier_arrive(bar, increment_count=False)")
    c = c[:a] + """                    for i in gl.static_range(4):
                        if i < together:
                            tile = (expert * units + first + i) * groups + 2 * k
                            mbarrier.expect(bar, codes.block_type.nbytes)
                            tma_load(codes, [tile * 64, 0], bar, cs.index(4 * at + i))
                            copy_async(ws.index(4 * at + i), words + tile * 64 + lane)
                        else:
                            mbarrier.arrive(bar, count=1)
""" + c[b:]
    c = c.replace("                rows = (first + lane // 32) * of_unit + lane % 32\n", "").replace("            of_expert = words + expert.to(gl.int64) * height * groups\n", "")
    return n, c, u
def nocopy(n, c, u):
    n, c, u = nox(n, c, u)
    a = c.index("                    for i in gl.static_range(4):\n                        if i < together:"); b = c.index("                    step += 1")
    return n, c[:a] + "                    mbarrier.arrive(bar, count=4)\n" + c[b:], u
def n48(n, c, u):
    n = sub(n, "                    finish_halves(\n                        total, bias", "                    finish_halves(\n                        total[0], bias")
    i = n.index("                    finish_halves("); j = n.index("                else:\n                    _leave")
    f = n[i:j]
    f32 = f.replace("BLOCK,\n", "32,\n")
    f16 = f.replace("BLOCK,\n", "16,\n").replace("total[0]", "total[1]").replace("gl.load(table + most + block)", "gl.load(table + most + block) + 32")
    n = n[:i] + f32 + f16 + n[j:]
    n = sub(n, "    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])\n    total = gl.zeros([64, BLOCK], gl.float32, sums)\n",
      "    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])\n    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])\n    total = gl.zeros([64, 32], gl.float32, sums), gl.zeros([64, 16], gl.float32, narrow)\n")
    n = n.replace("total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])", "t, s, a, b, c, d = warpgroup_mma_wait(0, deps=[total[0], total[1], a, b, c, d])\n        total = t, s")
    i = n.index("    x = xs.index(4 * at + 2 * HALF).slice")
    n = n[:i] + """    x = xs.index(4 * at + 2 * HALF).slice(32 * SUB, 32, 1)
    y = xs.index(4 * at + 2 * HALF + 1).slice(32 * SUB, 32, 1)
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    other: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    t = warpgroup_mma(a, x.slice(0, 32, 0).permute((1, 0)), total[0], is_async=True)
    s = warpgroup_mma(gl.convert_layout(a, other, assert_trivial=True), x.slice(32, 16, 0).permute((1, 0)), total[1], is_async=True)
    t = warpgroup_mma(b, y.slice(0, 32, 0).permute((1, 0)), t, is_async=True)
    s = warpgroup_mma(gl.convert_layout(b, other, assert_trivial=True), y.slice(32, 16, 0).permute((1, 0)), s, is_async=True)
    return t, s
"""
    n = n.replace("warpgroup_mma_wait(2,", "warpgroup_mma_wait(4,")
    return n, c, u
STAMP = """

@gluon.jit
def stamp(dbg, kind: gl.constexpr, step):
    if gl.program_id(0) == 5:
        place = (dbg + kind * 256 + step).to(gl.int64)
        gl.inline_asm_elementwise("{ .reg .u32 t; mov.u32 t, %clock; st.global.b32 [$1], t; mov.u32 $0, t; }", "=r,l", [place], gl.int32, is_pure=False, pack=1)

"""
def clk(n, c, u):
    n = sub(n, "    _multiply[(min(processors(x.device), blocks.number * units),)](\n", "    _multiply[(min(processors(x.device), blocks.number * units),)](\n        DBG,\n")
    n = sub(n, "def _multiply(\n", "def _multiply(\n    dbg,\n")
    n = sub(n, "            (_compute, (\n                bias,", "            (_compute, (\n                dbg, bias,")
    n = sub(n, "                codes, words, table, cs, ws, has, free,", "                dbg, codes, words, table, cs, ws, has, free,")
    n = sub(n, "                inputs, table, xs, has_x,", "                dbg, inputs, table, xs, has_x,")
    n = sub(n, "def _compute(\n    bias,", "def _compute(\n    dbg, bias,")
    n = sub(n, "_sums(\n                        xs, cs,", "_sums(\n                        dbg, xs, cs,")
    n = sub(n, "def _sums(\n    xs, cs", "def _sums(\n    dbg, xs, cs")
    n = sub(n, "        mbarrier.wait(has.index(at), (i // STAGES) & 1)\n        parts", "        stamp(dbg, 4 + 4 * WARPGROUP, i)\n        mbarrier.wait(has.index(at), (i // STAGES) & 1)\n        stamp(dbg, 5 + 4 * WARPGROUP, i)\n        parts")
    n = sub(n, "        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)\n", "        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)\n        stamp(dbg, 6 + 4 * WARPGROUP, i)\n")
    n = sub(n, "        mbarrier.arrive(free.index(at), count=1)\n    ", "        stamp(dbg, 7 + 4 * WARPGROUP, i)\n        mbarrier.arrive(free.index(at), count=1)\n    ")
    n = sub(n, "MOST = 64  # pairs", "DBG = None\nMOST = 64  # pairs")
    n = sub(n, "@gluon.jit\ndef _share(", STAMP.strip() + "\n\n\n@gluon.jit\ndef _share(")
    c = sub(c, "def load_rows(\n    codes", "def load_rows(\n    dbg, codes"); c = sub(c, "def load_tokens(\n    inputs", "def load_tokens(\n    dbg, inputs")
    c = sub(c, "@gluon.jit\ndef load_rows(", STAMP.strip() + "\n\n\n@gluon.jit\ndef load_rows(")
    i = c.index("def load_tokens"); a, b = c[:i], c[i:]
    w = "                    mbarrier.wait(free.index(at), ((step // STAGES) & 1) ^ 1)\n"
    a = sub(a, w, w + "                    stamp(dbg, 0, step)\n"); b = sub(b, w, w + "                    stamp(dbg, 2, step)\n")
    s = "                    step += 1\n"
    a = sub(a, s, "                    stamp(dbg, 1, step)\n" + s); b = sub(b, s, "                    stamp(dbg, 3, step)\n" + s)
    c = a + b
    return n, c, u
def split(sc, sx):
    """codes and tokens in rings of their own; codes are let go of once they are in registers."""
    def f(n, c, u):
        n = sub(n, "        STAGES=stages_of(blocks.size),\n", f"        STAGES={sc}[blocks.size],\n        STAGES_X={sx}[blocks.size],\n")
        n = n.replace("    STAGES: gl.constexpr,\n", "    STAGES: gl.constexpr,\n    STAGES_X: gl.constexpr,\n")
        n = n.replace("BLOCK, STAGES,\n            )),", "BLOCK, STAGES, STAGES_X,\n            )),").replace("has, has_x, free,", "has, has_x, free, free_x,")
        n = n.replace("WARPGROUP, BLOCK, STAGES\n", "WARPGROUP, BLOCK, STAGES, STAGES_X\n")
        n = sub(n, "[4 * STAGES, BLOCK, 64]", "[4 * STAGES_X, BLOCK, 64]")
        n = sub(n, "    has_x = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)\n", "    has_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], flag)\n    free_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], flag)\n")
        n = sub(n, "        mbarrier.init(has_x.index(i), count=1)\n", "")
        n = sub(n, "    if PDL:\n        gdc_launch", "    for i in gl.static_range(STAGES_X):\n        mbarrier.init(has_x.index(i), count=1)\n        mbarrier.init(free_x.index(i), count=4)\n    if PDL:\n        gdc_launch")
        n = sub(n, "table, xs, has_x, free, mine, end, most, units, quarter, STAGES, PDL,", "table, xs, has_x, free_x, mine, end, most, units, quarter, STAGES_X, PDL,") if "has_x, free, mine" in n else sub(n, "table, xs, has_x, free, free_x, mine, end, most, units, quarter, STAGES, PDL,", "table, xs, has_x, free_x, mine, end, most, units, quarter, STAGES_X, PDL,")
        n = n.replace("_leave(has, free, step, steps, STAGES)", "_leave(has, free, has_x, free_x, step, steps, STAGES, STAGES_X)")
        n = n.replace("def _leave(has, free, step, steps, STAGES: gl.constexpr):", "def _leave(has, free, has_x, free_x, step, steps, STAGES: gl.constexpr, STAGES_X: gl.constexpr):")
        n = sub(n, "        mbarrier.arrive(free.index(i % STAGES), count=1)\n", "        mbarrier.arrive(free.index(i % STAGES), count=1)\n        mbarrier.wait(has_x.index(i % STAGES_X), (i // STAGES_X) & 1)\n        mbarrier.arrive(free_x.index(i % STAGES_X), count=1)\n")
        n = n.replace("        at = i % STAGES\n", "        at = i % STAGES\n        ax = i % STAGES_X\n")
        n = n.replace("mbarrier.wait(has_x.index(at), (i // STAGES) & 1)", "mbarrier.wait(has_x.index(ax), (i // STAGES_X) & 1)")
        n = n.replace("xs, at, ", "xs, ax, ").replace("xs, ax, HALF", "xs, at, HALF")
        n = n.replace("        mbarrier.arrive(free.index(at), count=1)\n    ", "        mbarrier.arrive(free_x.index(ax), count=1)\n    ")
        n = sub(n, "        a, b = warpgroup_mma_wait(2, deps=[a, b])\n", "        mbarrier.arrive(free.index(at), count=1)\n        a, b = warpgroup_mma_wait(2, deps=[a, b])\n")
        i = n.index("    # One step at most"); tail = n[i:]
        tail = tail.replace("        a, b = left_factors(parts, 0)\n", "        mbarrier.arrive(free.index(at), count=1)\n        a, b = left_factors(parts, 0)\n", 1)
        return n[:i] + tail, c, u
    return f
def five(n, c, u):
    """of lin: five warpgroups."""
    i = n.index("            (_compute, ("); j = n.index("            (load_rows, (")
    last = n[:j].rindex("            (_compute, (")
    fifth = n[last:j].replace("quarter, 3, GATED", "quarter, 4, GATED")
    n = n[:j] + fifth + n[j:]
    n = n.replace("[4, 4, 4, 1, 1]", "[4, 4, 4, 4, 1, 1]").replace("[REGISTERS, REGISTERS, REGISTERS, 32, 32]", "[REGISTERS, REGISTERS, REGISTERS, REGISTERS, 32, 32]")
    n = n.replace("_REGISTERS = 112", "_REGISTERS = 96").replace("[4 * STAGES, 128, 32]", "[5 * STAGES, 128, 32]").replace("[4 * STAGES, 128]", "[5 * STAGES, 128]")
    n = n.replace("count=36)", "count=37)").replace("(free.index(i), count=4)", "(free.index(i), count=5)").replace("(free_x.index(i), count=4)", "(free_x.index(i), count=5)")
    n = n.replace("last, 4):", "last, 5):")
    i = c.index("@gluon.jit\ndef load_tokens"); a, b = c[:i], c[i:]
    a = a.replace("last, 4):", "last, 5):").replace("minimum(last - first, 4)", "minimum(last - first, 5)").replace("static_range(4)", "static_range(5)").replace("4 * at + i", "5 * at + i")
    b = b.replace("last, 4):", "last, 5):")
    u = u.replace("at = 4 * stage + WARPGROUP", "at = 5 * stage + WARPGROUP")
    return n, a + b, u
S4 = ({64: 4, 32: 4, 16: 5}, {64: 2, 32: 4, 16: 5})
S5 = ({64: 3, 32: 4, 16: 4}, {64: 2, 32: 2, 16: 4})
def skew(cycles):
    """warpgroups begin one after the other."""
    def f(n, c, u):
        n = sub(n, "    before = 0  # units of the blocks before this one\n", f"""    before = 0  # units of the blocks before this one
    if mine < end:
        mbarrier.wait(has_x.index(0), 0)
        _spin({cycles} * WARPGROUP)
""")
        n = sub(n, "@gluon.jit\ndef _leave(", """@gluon.jit
def _spin(cycles: gl.constexpr):
    if cycles > 0:
        gl.inline_asm_elementwise(
            "{ .reg .u32 s, t; .reg .pred p; mov.u32 s, %clock; AGAIN: mov.u32 t, %clock; sub.u32 t, t, s; setp.lt.u32 p, t, $1; @p bra AGAIN; mov.u32 $0, t; }",
            "=r,r", [gl.to_tensor(cycles)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _leave(""")
        return n, c, u
    return f
def pre(n, c, u):
    """the next step's first factors are unpacked before the last products of this one are done."""
    i = n.index("    for i in range(step, step + quarter // 64):"); j = n.index("@gluon.jit\ndef _multiplied(")
    body = """    full = step + quarter // 64
    last = step + (quarter + 63) // 64
    mbarrier.wait(has.index(step % STAGES), (step // STAGES) & 1)
    parts = packed_parts(cs, ws, step % STAGES, 0, WARPGROUP)
    a, b = left_factors(parts, 0, sums)
    mbarrier.wait(has_x.index(step % STAGES), (step // STAGES) & 1)
    for i in range(step, full):
        at = i % STAGES
        total = _multiplied(a, b, xs, at, 0, 0, total)
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 0, total)
        parts = packed_parts(cs, ws, at, 1, WARPGROUP)
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        a, b = left_factors(parts, 0, sums)
        total = _multiplied(a, b, xs, at, 0, 1, total)
        c, d = warpgroup_mma_wait(2, deps=[c, d])
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 1, total)
        following = gl.minimum(i + 1, last - 1)  # of the last, its own once more
        mbarrier.wait(has.index(following % STAGES), (following // STAGES) & 1)
        parts = packed_parts(cs, ws, following % STAGES, 0, WARPGROUP)
        a, b = warpgroup_mma_wait(2, deps=[a, b])
        a, b = left_factors(parts, 0, sums)
        mbarrier.wait(has_x.index(following % STAGES), (following // STAGES) & 1)
        total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])
        mbarrier.arrive(free.index(at), count=1)
    # One step at most, where a quarter ends in the middle of it.
    for i in range(full, last):
        at = i % STAGES
        total = _multiplied(a, b, xs, at, 0, 0, total)
        c, d = left_factors(parts, 1, sums)
        total = _multiplied(c, d, xs, at, 1, 0, total)
        total, a, b, c, d = warpgroup_mma_wait(0, deps=[total, a, b, c, d])
        mbarrier.arrive(free.index(at), count=1)
    return total


"""
    if "WARPGROUP, sums)" in n:
        body = body.replace("WARPGROUP)", "WARPGROUP, sums)").replace("(parts, 0, sums)", "(parts, 0)").replace("(parts, 1, sums)", "(parts, 1)")
    return n[:i] + body + n[j:], c, u
def padx(n, c, u):
    n = sub(n, "out = torch.empty((len(blocks.order), features)", "out = torch.empty((len(blocks.order) + 64, features)")
    return n, c, u
V = dict(base=lambda *x: x, padx=padx)
if __name__ == "__main__":
    for v, f in V.items():
        n, c, u = f(N, C, U)
        n = n.replace("quire.kernels.triton.experts.hopper_narrow_copies", f"c_{v}").replace("quire.kernels.triton.experts.hopper_unpack", f"u_{v}")
        for k, t in zip("ncu", (n, c, u)): open(f"{k}_{v}.py", "w").write(t)
