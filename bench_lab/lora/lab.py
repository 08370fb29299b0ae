"""Adapters of one prompt of 8,192 rows over Qwen3-8B's shapes: today's pieces and candidates, in turns."""
import faulthandler, os, sys, time, subprocess, statistics
faulthandler.enable()
from pathlib import Path
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "src"), str(HERE)]
START = time.time()
LIMIT = float(os.environ.get("LAB_SECONDS", "42"))
import torch
import torch.nn.functional as F
import triton
import kernels as K
from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterSlots, SlotRun
from quire.kernels.triton.act_and_mul import act_and_mul
from today_runs import add_runs, gated_runs
from quire.kernels.triton.adapters import expand as E_, expand_gated as G_, ranks as R_
from quire.kernels.triton.adapters.gated_runs import gated_runs as built_gated
from quire.kernels.triton.adapters.runs import add_runs as built_add, multiply_runs, shrink_runs
from quire.kernels.adapter_slots import AdapterBatch, SortedRows, most_tiles, tile_rows
import numpy as np
from quire.kernels.triton.norm import add_rms_norm

H, I, RANK = 4096, 12288, 16
QKV = (4096, 1024, 1024)
dev, bf = "cuda", torch.bfloat16
WORKERS = 14


def slots_of(inputs, sizes, seed):
    g = torch.Generator(device=dev).manual_seed(seed)
    n, feats = len(sizes), sum(sizes)
    a = (torch.randn(1, n * RANK, inputs, device=dev, generator=g) * inputs**-0.5).to(bf)
    b = (torch.randn(1, RANK, feats, device=dev, generator=g) * RANK**-0.5).to(bf)
    i32 = dict(dtype=torch.int32, device=dev)
    cols = [0]
    for s in sizes: cols.append(cols[-1] + s)
    table = torch.tensor([[RANK * i for i in range(n + 1)]], **i32)
    slots = AdapterSlots(a, b, torch.zeros(1, feats, device=dev, dtype=bf), table, torch.zeros(1, **i32),
                         torch.tensor(cols, **i32), tuple(sizes), [(RANK,) * n], [False])
    columns = torch.tensor([cols, [RANK * i for i in range(n + 1)]], **i32)
    return slots, columns


class Data:
    def __init__(self, rows):
        g = torch.Generator(device=dev).manual_seed(1)
        r = lambda *s, k=1.0: (torch.randn(*s, device=dev, generator=g, dtype=torch.float32) * k).to(bf)
        self.rows = rows
        self.stream, self.delta, self.norm = r(rows, H), r(rows, H, k=0.01), torch.ones(H, device=dev, dtype=bf)
        self.attn, self.x = r(rows, H), r(rows, H)
        self.w = {"qkv": r(sum(QKV), H, k=H**-0.5), "o": r(H, H, k=H**-0.5),
                  "gate_up": r(2 * I, H, k=H**-0.5), "down": r(H, I, k=I**-0.5)}
        self.s = {"qkv": slots_of(H, QKV, 2), "o": slots_of(H, (H,), 3),
                  "gate_up": slots_of(H, (I, I), 4), "down": slots_of(I, (H,), 5)}
        self.runs = (SlotRun(0, slice(0, rows)),)


EXPANDS = [(64, 128, 4), (64, 128, 8), (32, 256, 4), (64, 256, 8), (128, 128, 8)]
SHRINKS = [(64, 128, 4, 1, 4), (64, 64, 6, 1, 4), (128, 64, 4, 1, 8), (64, 128, 3, 2, 4)]
GATES = [  # rows, features, stages, warps, parts, fuse
    (64, 64, 1, 4, 8, True), (64, 64, 1, 4, 16, True), (64, 64, 1, 4, 32, True), (64, 64, 2, 4, 16, True),
    (64, 64, 3, 4, 16, True), (64, 64, 1, 8, 16, True), (64, 64, 2, 8, 16, True), (128, 64, 1, 8, 16, True),
    (64, 32, 1, 4, 16, True), (64, 64, 1, 4, 16, False), (64, 64, 1, 4, 192, False)]


DECODES = [(64, 4), (64, 2), (128, 4), (128, 2), (256, 4), (128, 8)]  # features of a block, warps
_constants = R_.launch_constants


def set_blocks(features, warps):
    E_.FEATURES = G_.FEATURES = R_.FEATURES = features
    def constants(*args): return {**_constants(*args), "num_warps": warps}
    E_.launch_constants = G_.launch_constants = constants


class DecodeStep:
    """A layer of a step of decodes, as many rows for each of all slots."""
    def __init__(self, rows, slots):
        self.rows, self.slots = rows, slots
        g = torch.Generator(device=dev).manual_seed(7)
        r = lambda *s, k=1.0: (torch.randn(*s, device=dev, generator=g) * k).to(bf)
        used = np.arange(rows, dtype=np.int32) * 7 % slots
        order = SortedRows.of(used)
        tiles = np.empty((3, most_tiles(rows, slots)), dtype=np.int32)
        order.write_tiles(tile_rows(rows), tiles)
        to = lambda a: torch.from_numpy(a).to(dev)
        self.batch = AdapterBatch(to(used), to(order.order), to(tiles), tile_rows(rows))
        self.used = used
        self.stream, self.delta, self.norm, self.attn = r(rows, H), r(rows, H), torch.ones(H, device=dev, dtype=bf), r(rows, H)
        self.w, self.joint, self.s = {}, {}, {}
        for n, (inputs, sizes) in {"qkv": (H, QKV), "o": (H, (H,)), "gate_up": (H, (I, I)), "down": (I, (H,))}.items():
            outputs, feats = len(sizes), sum(sizes)
            both = r(feats + slots * outputs * RANK, inputs, k=inputs**-0.5)
            self.joint[n], self.w[n] = both, both[:feats]
            cols = [0]
            for size in sizes: cols.append(cols[-1] + size)
            i32 = dict(dtype=torch.int32, device=dev)
            self.s[n] = AdapterSlots(both[feats:].view(slots, outputs * RANK, inputs), r(slots, RANK, feats, k=0.25),
                torch.zeros(slots, feats, device=dev, dtype=bf), torch.tensor([[RANK * i for i in range(outputs + 1)]] * slots, **i32),
                torch.zeros(slots, **i32), torch.tensor(cols, **i32), tuple(sizes), [(RANK,) * outputs] * slots, [False] * slots)

    def both(self, n, x):
        y = F.linear(x, self.joint[n])
        feats = len(self.w[n])
        return y[:, :feats], y[None, :, feats:]

    def put(self, n, x):
        p, h = self.both(n, x)
        return E_.expanded(h, self.s[n], self.batch, p)

    def layer(self, features, warps):
        set_blocks(features, warps)
        x = add_rms_norm(self.stream, self.delta, self.norm, 1e-6)
        q = self.put("qkv", x); o = self.put("o", self.attn)
        x = add_rms_norm(self.stream, o, self.norm, 1e-6)
        p, h = self.both("gate_up", x)
        z = G_.expand_gated(h, self.s["gate_up"], self.batch, p, Activation.SILU)
        return q, self.put("down", z)

    def products(self):
        """All but what is added."""
        x = add_rms_norm(self.stream, self.delta, self.norm, 1e-6)
        self.both("qkv", x); o, _ = self.both("o", self.attn)
        x = add_rms_norm(self.stream, o, self.norm, 1e-6)
        p, _ = self.both("gate_up", x)
        return self.both("down", act_and_mul(p, Activation.SILU))[0]

    def base(self):
        x = add_rms_norm(self.stream, self.delta, self.norm, 1e-6)
        q = F.linear(x, self.w["qkv"]); o = F.linear(self.attn, self.w["o"])
        x = add_rms_norm(self.stream, o, self.norm, 1e-6)
        return q, F.linear(act_and_mul(F.linear(x, self.w["gate_up"]), Activation.SILU), self.w["down"])


def graphs():
    """Of ten layers each."""
    found, alive = {}, []
    for rows, slots in ((24, 8), (32, 8), (128, 32)):
        step = DecodeStep(rows, slots)
        alive.append(step)  # graphs read its tensors
        kinds = {"without": step.base, "products alone": step.products}
        kinds |= {f"blocks of {f}, {w} warps": (lambda f=f, w=w, step=step: step.layer(f, w)) for f, w in DECODES}
        for name, fn in kinds.items():
            fn(); torch.cuda.synchronize()
            if "blocks" in name:
                x = add_rms_norm(step.stream, torch.zeros_like(step.delta), step.norm, 1e-6)
                y = step.put("qkv", x)
                s = (x.double()[:, None] @ step.s["qkv"].a[step.used].double().mT)[:, 0].to(bf).double()
                b = step.s["qkv"].b[step.used].double()
                added = torch.cat([(s[:, None, 16 * i:16 * i + 16] @ b[:, :, step.s["qkv"].columns[i]:step.s["qkv"].columns[i + 1]])[:, 0] for i in range(3)], 1)
                e = rel(y, x.double() @ step.w["qkv"].double().T + added)
                if not e < 6e-3: print(f"  decode {rows} {name} WRONG {e:.2e}", flush=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(10): fn()
            found[f"decode  {rows:3d} rows, {slots:2d} slots: {name}"] = graph
    set_blocks(64, 4)
    return found, alive


def new_add(x, slots, runs, y, h=None):
    built_add(shrink_runs(x, slots, runs) if h is None else h, slots, runs, y)


def new_gated(x, slots, runs, product, activation, reader):
    return built_gated(shrink_runs(x, slots, runs), slots, runs, product, activation, reader)


def new_multiply(x, w, slots, runs, h=None):
    return multiply_runs(x, w, shrink_runs(x, slots, runs) if h is None else h, slots, runs)


def own_expand(d, name, hidden, y, add, config):
    slots, columns = d.s[name]
    K.expand(hidden, slots.b[0], y, columns, len(slots.sizes), add, *config)


def own_shrink(d, name, x, config):
    R, C, S, P, W = config
    return K.shrink(x, d.s[name][0].a[0], R, C, S, P, W)


def own_gate(d, hidden, product, config):
    R, Fe, S, W, P, fuse = config
    return K.gate(hidden, d.s["gate_up"][0].b[0], product, d.s["down"][0].a[0], P, R, Fe, S, W, fuse)


def lin_shrink(d, name, x):
    return F.linear(x, d.s[name][0].a[0])


def jobs(d):
    """What must be compiled: each is run once with few rows."""
    todo = []
    x, h = {n: d.attn if n != "down" else torch.randn(d.rows, I, device=dev).to(bf) for n in d.w}, {}
    for n in d.w:
        h[n] = lin_shrink(d, n, x[n])
    y = {n: F.linear(x[n], d.w[n]) for n in d.w}
    todo += [lambda: add_rms_norm(d.stream, d.delta, d.norm, 1e-6), lambda: act_and_mul(y["gate_up"], Activation.SILU),
             lambda: add_runs(d.attn, d.s["o"][0], d.runs, y["o"]), lambda: add_runs(d.attn, d.s["qkv"][0], d.runs, y["qkv"]),
             lambda: gated_runs(d.attn, d.s["gate_up"][0], d.runs, y["gate_up"], Activation.SILU)]
    todo += [lambda: new_multiply(d.attn, d.w["qkv"], d.s["qkv"][0], d.runs), lambda: new_multiply(d.attn, d.w["o"], d.s["o"][0], d.runs),
             lambda: new_add(d.attn, d.s["qkv"][0], d.runs, y["qkv"]), lambda: new_add(d.attn, d.s["o"][0], d.runs, y["o"]),
             lambda: new_gated(d.attn, d.s["gate_up"][0], d.runs, y["gate_up"], Activation.SILU, d.s["down"][0])]
    for c in GATES:
        todo.append(lambda c=c: own_gate(d, h["gate_up"], y["gate_up"], c))
    for c in DECODES:
        todo.append(lambda c=c: [step.layer(*c) for step in (DecodeStep(32, 8), DecodeStep(128, 32))])
    for n in ("qkv", "o"):
        for c in EXPANDS:
            for add in (True, False):
                todo.append(lambda n=n, c=c, add=add: own_expand(d, n, h[n], y[n], add, c))
    for n in d.w:
        for c in SHRINKS:
            todo.append(lambda n=n, c=c: own_shrink(d, n, x[n], c))
    return todo


def compile_some(i):
    todo = jobs(Data(256))
    for job in todo[i::WORKERS]:
        try:
            job()
        except Exception as e:
            print("compile", i, type(e).__name__, str(e)[:200], flush=True)
    torch.cuda.synchronize()


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(d):
    """On some rows, against float64."""
    pick = torch.randint(0, d.rows, (192,), device=dev)
    bad = []

    def exact(n, x):
        slots, _ = d.s[n]
        s = (x[pick].double() @ slots.a[0].double().T).to(bf).double()
        parts, at = [], 0
        for i, size in enumerate(slots.sizes):
            parts.append(s[:, i * RANK:(i + 1) * RANK] @ slots.b[0, :, at:at + size].double()); at += size
        return x[pick].double() @ d.w[n].double().T + torch.cat(parts, 1)

    def say(label, found, wanted, most=6e-3):
        e = rel(found, wanted)
        print(f"  {label:44s} {e:.2e}{'' if e < most else '   WRONG'}", flush=True)
        if not e < most: bad.append(label)

    for n in ("qkv", "o"):
        wanted = exact(n, d.x)
        y = F.linear(d.x, d.w[n]); add_runs(d.x, d.s[n][0], d.runs, y); say(f"{n} today", y[pick], wanted)
        h = lin_shrink(d, n, d.x)
        for c in EXPANDS:
            y = F.linear(d.x, d.w[n]); own_expand(d, n, h, y, True, c); say(f"{n} add {c}", y[pick], wanted)
            y = torch.full_like(y, torch.nan); own_expand(d, n, h, y, False, c); y.addmm_(d.x, d.w[n].t())
            say(f"{n} write, then addmm {c}", y[pick], wanted)
    xd = F.silu(torch.randn(d.rows, I, device=dev)).to(bf)
    for n in d.w:
        x = xd if n == "down" else d.x
        wanted = x[pick].double() @ d.s[n][0].a[0].double().T
        for c in SHRINKS:
            say(f"{n} shrink {c}", own_shrink(d, n, x, c)[pick], wanted)
    g = exact("gate_up", d.x)
    gate, up = g.chunk(2, 1)
    wanted = F.silu(gate) * up
    y = F.linear(d.x, d.w["qkv"]); new_add(d.x, d.s["qkv"][0], d.runs, y); say("qkv built, added", y[pick], exact("qkv", d.x))
    say("qkv built", new_multiply(d.x, d.w["qkv"], d.s["qkv"][0], d.runs)[pick], exact("qkv", d.x))
    product, h = F.linear(d.x, d.w["gate_up"]), lin_shrink(d, "gate_up", d.x)
    out, s = new_gated(d.x, d.s["gate_up"][0], d.runs, product, Activation.SILU, d.s["down"][0])
    say("gate built", out[pick], wanted, 1e-2)
    say("   and what down's a makes of it", s[pick], out[pick].double() @ d.s["down"][0].a[0].double().T)
    say("gate today", gated_runs(d.x, d.s["gate_up"][0], d.runs, product, Activation.SILU)[pick], wanted, 1e-2)
    for c in GATES:
        out, s = own_gate(d, h, product, c)
        say(f"gate {c}", out[pick], wanted, 1e-2)
        if s is not None:
            say("   and what down's a makes of it", s[pick], out[pick].double() @ d.s["down"][0].a[0].double().T)
    return bad


def sequences(d, bad):
    """Lists of (label, what is timed) or (None, what goes before it)."""
    seqs = []
    norm = lambda: add_rms_norm(d.stream, d.delta, d.norm, 1e-6)
    st = {}
    def keep(name, fn):
        def run(): st[name] = fn()
        return run
    xs = {"qkv": "x", "gate_up": "x", "o": "attn", "down": "act"}
    st["attn"], st["act"] = d.attn, F.silu(torch.randn(d.rows, I, device=dev)).to(bf)
    fresh = torch.empty_like(st["act"])
    def bring(n):  # x as the kernel before leaves it, in the cache or not
        if xs[n] == "x": return (None, keep("x", norm))
        if xs[n] == "attn": return (None, keep("attn", lambda: d.attn.clone()))
        return (None, keep("act", lambda: fresh.copy_(st["act"]) if st["act"] is not fresh else fresh.mul_(1.0)))
    for n in d.w:
        x = xs[n]
        seqs.append([bring(n), (f"{n:7s} product alone", lambda n=n, x=x: F.linear(st[x], d.w[n]))])
        seqs.append([bring(n), (f"{n:7s} shrink by cuBLAS", lambda n=n, x=x: lin_shrink(d, n, st[x]))])
        for c in SHRINKS:
            seqs.append([bring(n), (f"{n:7s} shrink {c}", lambda n=n, x=x, c=c: own_shrink(d, n, st[x], c))])
    for n in ("qkv", "o", "down"):
        x = xs[n]
        def prod(n=n, x=x): st["y"] = F.linear(st[x], d.w[n])
        seqs.append([bring(n), (f"{n:7s} product, shrink, add: today", lambda n=n, x=x, prod=prod: (prod(), add_runs(st[x], d.s[n][0], d.runs, st["y"])))])
        for c in EXPANDS:
            seqs.append([bring(n), (None, keep("h", lambda n=n, x=x: lin_shrink(d, n, st[x]))), (None, prod),
                         (f"{n:7s} add {c}", lambda n=n, c=c: own_expand(d, n, st["h"], st["y"], True, c))])
        def empty(): st["y2"] = torch.empty_like(st["y"])
        for c in EXPANDS:
            seqs.append([bring(n), (None, keep("h", lambda n=n, x=x: lin_shrink(d, n, st[x]))), (None, empty),
                         (f"{n:7s} write {c}", lambda n=n, c=c: own_expand(d, n, st["h"], st["y2"], False, c)),
                         (f"{n:7s} addmm_ behind it", lambda n=n, x=x: st["y2"].addmm_(st[x], d.w[n].t()))])
    gu = (None, keep("p", lambda: F.linear(st["x"], d.w["gate_up"])))
    hh = (None, keep("h", lambda: lin_shrink(d, "gate_up", st["x"])))
    seqs.append([bring("gate_up"), gu, ("gate    act_and_mul alone", lambda: act_and_mul(st["p"], Activation.SILU))])
    seqs.append([bring("gate_up"), gu, ("gate    today (with its shrink)", lambda: gated_runs(st["x"], d.s["gate_up"][0], d.runs, st["p"], Activation.SILU))])
    for c in GATES:
        seqs.append([bring("gate_up"), hh, gu, (f"gate    {c}", lambda c=c: own_gate(d, st["h"], st["p"], c))])

    # Whole layers without attention.
    def base():
        x = norm(); F.linear(x, d.w["qkv"]); F.linear(d.attn, d.w["o"]); x = norm()
        F.linear(act_and_mul(F.linear(x, d.w["gate_up"]), Activation.SILU), d.w["down"])
    def today():
        x = norm(); y = F.linear(x, d.w["qkv"]); add_runs(x, d.s["qkv"][0], d.runs, y)
        y = F.linear(d.attn, d.w["o"]); add_runs(d.attn, d.s["o"][0], d.runs, y)
        x = norm(); p = F.linear(x, d.w["gate_up"])
        z = gated_runs(x, d.s["gate_up"][0], d.runs, p, Activation.SILU)
        y = F.linear(z, d.w["down"]); add_runs(z, d.s["down"][0], d.runs, y)
    def new(shrink, gate, write, add):
        def put(n, x, h):
            if write is not None:
                y = torch.empty(d.rows, len(d.w[n]), device=dev, dtype=bf)
                own_expand(d, n, h, y, False, write); y.addmm_(x, d.w[n].t())
            else:
                y = F.linear(x, d.w[n]); own_expand(d, n, h, y, True, add)
        def run():
            x = norm(); put("qkv", x, shrink("qkv", x))
            put("o", d.attn, shrink("o", d.attn))
            x = norm(); h = shrink("gate_up", x); p = F.linear(x, d.w["gate_up"])
            z, s = own_gate(d, h, p, gate)
            put("down", z, s if s is not None else shrink("down", z))
        return run
    cu = lambda n, x: lin_shrink(d, n, x)
    own = lambda n, x: own_shrink(d, n, x, SHRINKS[0])
    own2 = lambda n, x: own_shrink(d, n, x, SHRINKS[3])
    seqs.append([("layer   without", base)])
    seqs.append([("layer   today", today)])
    seqs.append([("layer   cuBLAS shrink, gate fused 16, add", new(cu, GATES[1], None, EXPANDS[1]))])
    seqs.append([("layer   cuBLAS shrink, gate fused 16, write+addmm", new(cu, GATES[1], EXPANDS[0], None))])
    seqs.append([("layer   own shrink, gate fused 16, add", new(own, GATES[1], None, EXPANDS[1]))])
    seqs.append([("layer   own shrink, gate fused 16, write+addmm", new(own, GATES[1], EXPANDS[0], None))])
    seqs.append([("layer   own shrink 2, gate fused 32, write+addmm", new(own2, GATES[2], EXPANDS[0], None))])
    seqs.append([("layer   own shrink, gate fused 16 pipelined, write+addmm", new(own, GATES[4], EXPANDS[0], None))])
    seqs.append([("layer   own shrink, gate fused 8 warps, write+addmm", new(own, GATES[5], EXPANDS[0], None))])
    def built():
        x = norm(); y = F.linear(x, d.w["qkv"]); new_add(x, d.s["qkv"][0], d.runs, y)
        y = F.linear(d.attn, d.w["o"]); new_add(d.attn, d.s["o"][0], d.runs, y)
        x = norm(); p = F.linear(x, d.w["gate_up"])
        z, h = new_gated(x, d.s["gate_up"][0], d.runs, p, Activation.SILU, d.s["down"][0])
        y = F.linear(z, d.w["down"]); new_add(z, d.s["down"][0], d.runs, y, h)
    def chunked(step):
        def part(n, x, h):
            y = torch.empty(d.rows, len(d.w[n]), device=dev, dtype=bf)
            for i in range(0, d.rows, step):
                torch.mm(x[i:i + step], d.w[n].t(), out=y[i:i + step])
                own_expand(d, n, h[i:i + step], y[i:i + step], True, EXPANDS[1])
        def run():
            x = norm(); part("qkv", x, cu("qkv", x)); part("o", d.attn, cu("o", d.attn))
            x = norm(); h = cu("gate_up", x); p = F.linear(x, d.w["gate_up"])
            z, s = own_gate(d, h, p, GATES[1])
            part("down", z, s)
        return run
    def built_too():
        x = norm(); h = shrink_runs(x, d.s["qkv"][0], d.runs); multiply_runs(x, d.w["qkv"], h, d.s["qkv"][0], d.runs)
        h = shrink_runs(d.attn, d.s["o"][0], d.runs); multiply_runs(d.attn, d.w["o"], h, d.s["o"][0], d.runs)
        x = norm(); h = shrink_runs(x, d.s["gate_up"][0], d.runs); p = F.linear(x, d.w["gate_up"])
        z, h = built_gated(h, d.s["gate_up"][0], d.runs, p, Activation.SILU, d.s["down"][0])
        multiply_runs(z, d.w["down"], h, d.s["down"][0], d.runs)
    seqs.append([("layer   built, added behind the product", built)])
    seqs.append([("layer   BUILT ON THE BRANCH", built_too)])
    seqs.append([("layer   cuBLAS shrink, gate fused 16, chunks of 2048", chunked(2048))])
    seqs.append([("layer   cuBLAS shrink, gate fused 16, chunks of 4096", chunked(4096))])
    seqs.append([("gate    built on the branch", lambda: None)][:0] + [bring("gate_up"), gu, ("gate    built on the branch (with its shrink)", lambda: new_gated(st["x"], d.s["gate_up"][0], d.runs, st["p"], Activation.SILU, d.s["down"][0]))])
    seqs.append([("layer   without, again", base)])
    return [s for s in seqs if s[-1][0] not in bad]


def table(times):
    for label, t in times.items():
        q = statistics.quantiles(t, n=4) if len(t) > 1 else t * 3
        print(f"{label:66s} {q[1]:9.1f}  {q[0]:9.1f} {q[2]:9.1f}", flush=True)


def turns(do, seconds):
    """What each label took in microseconds, over turns until the time is over."""
    times, began = {}, time.time()
    for turn in range(60):
        if turn > 3 and time.time() - began > seconds: break
        marks = []
        torch.cuda._sleep(20_000_000)
        do(marks)
        torch.cuda.synchronize()
        if turn:
            for label, a, b in marks: times.setdefault(label, []).append(a.elapsed_time(b) * 1e3)
    return times


def timed(label, fn, marks):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); fn(); b.record(); marks.append((label, a, b))


def measure_prompts():
    d = Data(8192)
    bad = check(d) if os.environ.get("LAB_CHECK", "1") == "1" else []
    torch.cuda.synchronize()
    print(f"checked, {time.time() - START:.1f} s; wrong: {bad}", flush=True)
    seqs = sequences(d, bad)
    for seq in seqs:  # one by one: what fails is named
        for label, fn in seq:
            fn()
        torch.cuda.synchronize()
        if os.environ.get("LAB_VERBOSE"): print("ran", seq[-1][0], flush=True)

    def do(marks):
        for seq in seqs:
            for label, fn in seq:
                fn() if label is None else timed(label, fn, marks)
    times = turns(do, 6)
    print(f"measured, {time.time() - START:.1f} s; microseconds: median, quartiles")
    table(times)
    w, a = statistics.median(times["layer   without"]), statistics.median(times["layer   without, again"])
    print("over the layer without, us:")
    for label, t in times.items():
        if label.startswith("layer"):
            print(f"{label:66s} {statistics.median(t) - (w + a) / 2:9.1f}", flush=True)


def measure_decodes():
    found, alive = graphs()
    torch.cuda.synchronize()
    for label, graph in found.items():
        graph.replay(); torch.cuda.synchronize()
    times = turns(lambda marks: [timed(label, graph.replay, marks) for label, graph in found.items()], 3)
    print("decodes, ten layers each, microseconds: median, quartiles")
    table(times)


def main():
    workers = [subprocess.Popen([sys.executable, __file__, "compile", str(i)]) for i in range(WORKERS)]
    for w in workers:
        try:
            w.wait(max(1, START + LIMIT - 18 - time.time()))
        except subprocess.TimeoutExpired:
            w.kill()
    print(f"compiled, {time.time() - START:.1f} s", torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in ("prompts", "decodes"):  # in processes of their own: if one breaks, the other is measured
        left = START + LIMIT - time.time()
        try:
            done = subprocess.run([sys.executable, __file__, part], timeout=max(1, left))
            print(f"{part}: rc {done.returncode}, {time.time() - START:.1f} s", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{part}: ended by the clock", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_some(int(sys.argv[2]))
    elif sys.argv[1:2] == ["prompts"]:
        measure_prompts()
    elif sys.argv[1:2] == ["decodes"]:
        measure_decodes()
    else:
        main()
