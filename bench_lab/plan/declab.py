"""Decode layers with 32 slots: which matrices have their slots joined, and blocks of how many features."""
import itertools, statistics, sys, time
import numpy as np, torch, torch.nn.functional as F
from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots, SortedRows, most_tiles, tile_rows
from quire.kernels.triton.act_and_mul import act_and_mul
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.adapters import expand as E_, expand_gated as G_, ranks as R_
from quire.kernels.triton.adapters.shrink import shrink
dev, bf, RANK, H, I, QKV = torch.device("cuda"), torch.bfloat16, 16, 4096, 12288, (4096, 1024, 1024)
def set_blocks(f, w=4):
    E_.FEATURES = G_.FEATURES = R_.FEATURES = f
class Step:
    def __init__(self, rows, slots):
        g = torch.Generator(device=dev).manual_seed(7)
        r = lambda *s, k=1.0: (torch.randn(*s, device=dev, generator=g) * k).to(bf)
        used = np.arange(rows, dtype=np.int32) * 7 % slots
        order = SortedRows.of(used); tiles = np.empty((3, most_tiles(rows, slots)), dtype=np.int32); order.write_tiles(tile_rows(rows), tiles)
        to = lambda a: torch.from_numpy(a).to(dev)
        self.batch = AdapterBatch(to(used), to(order.order), to(tiles), tile_rows(rows))
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
    def both(self, n, x, joined):
        if n in joined:
            y = F.linear(x, self.joint[n]); feats = len(self.w[n])
            return y[:, :feats], y[None, :, feats:]
        h = shrink(x, self.s[n], self.batch)
        return F.linear(x, self.w[n]), h
    def put(self, n, x, joined):
        p, h = self.both(n, x, joined)
        if n in joined: return E_.expanded(h, self.s[n], self.batch, p)
        E_.expand(h, self.s[n], self.batch, p); return p
    def layer(self, joined):
        x = add_rms_norm(self.stream, self.delta, self.norm, 1e-6)
        q = self.put("qkv", x, joined); o = self.put("o", self.attn, joined)
        x = add_rms_norm(self.stream, o, self.norm, 1e-6)
        p, h = self.both("gate_up", x, joined)
        z = G_.expand_gated(h, self.s["gate_up"], self.batch, p, Activation.SILU)
        return q, self.put("down", z, joined)
    def base(self):
        x = add_rms_norm(self.stream, self.delta, self.norm, 1e-6)
        F.linear(x, self.w["qkv"]); o = F.linear(self.attn, self.w["o"])
        x = add_rms_norm(self.stream, o, self.norm, 1e-6)
        return F.linear(act_and_mul(F.linear(x, self.w["gate_up"]), Activation.SILU), self.w["down"])
ALL = ("qkv", "o", "gate_up", "down")
JOINED = {"all": ALL, "none": (), "gate": ("gate_up",), "gate qkv": ("gate_up", "qkv"), "gate o": ("gate_up", "o"), "gate down": ("gate_up", "down"), "no qkv": ("o", "gate_up", "down"), "no down": ("qkv", "o", "gate_up"), "no o": ("qkv", "gate_up", "down")}
for rows in (32, 64, 96, 128):
    step = Step(rows, 32); graphs = {}
    wanted = None
    for name, fn in [("without", step.base)] + [(f"{j}, {f}", (lambda j=j, f=f: (set_blocks(f), step.layer(JOINED[j]))[1])) for f in (64, 256) for j in JOINED]:
        got = fn(); torch.cuda.synchronize()
        if name != "without":
            if wanted is None: wanted = got
            e = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, wanted))
            if not e < 6e-3: print(rows, name, "DIFFERS", e)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(10): fn()
        graphs[name] = g
    times = {n: [] for n in graphs}
    for _ in range(9):
        for n, g in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); a.record(); g.replay(); b.record(); b.synchronize(); times[n].append(100 * a.elapsed_time(b))
    base = statistics.median(times["without"])
    print(rows, f"rows: without {base:.1f} us a layer;", "; ".join(f"{n}: +{statistics.median(t) - base:.1f}" for n, t in sorted(times.items(), key=lambda x: statistics.median(x[1])) if n != "without"), flush=True)
# products alone
for rows in (64, 128):
    for n, k, sizes in (("qkv", 4096, (6144, 6144 + 384, 6144 + 1536)), ("o", 4096, (4096, 4224, 4608)), ("gate_up", 4096, (24576, 24832, 25600)), ("down", 12288, (4096, 4224, 4608))):
        row = []
        for f in sizes:
            w = [torch.randn(f, k, device=dev, dtype=bf) for _ in range(4)]; x = torch.randn(rows, k, device=dev, dtype=bf)
            for each in w: F.linear(x, each)
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for _ in range(5):
                    for each in w: F.linear(x, each)
            ts = []
            for _ in range(7):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(); g.replay(); b.record(); b.synchronize(); ts.append(50 * a.elapsed_time(b))
            row.append(f"{f}: {statistics.median(ts):.1f}")
        print(rows, n, *row)
