"""Decode layers with adapters: what a norm adds itself against `expanded` and a norm.

lab.py check ROWS SLOTS   every kernel against float64, which also compiles it
lab.py time               medians of ten layers in a graph, interleaved
"""
import statistics, sys, time
import numpy as np, torch, torch.nn.functional as F
from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots, SortedRows, most_tiles, tile_rows
from quire.kernels.triton.act_and_mul import act_and_mul
from quire.kernels.triton.adapters import norm as held, norm_all as every
from quire.kernels.triton.adapters.expand import expand, expanded
from quire.kernels.triton.adapters.expand_gated import expand_gated
from quire.kernels.triton.adapters.few import gemv_and_shrink
from quire.kernels.triton.gemv import gemv
from quire.kernels.triton.norm import add_rms_norm

dev, bf, RANK, H, I, QKV = torch.device("cuda"), torch.bfloat16, 16, 4096, 12288, (4096, 1024, 1024)
MATRICES = {"qkv": (H, QKV), "o": (H, (H,)), "gate_up": (H, (I, I)), "down": (I, (H,))}
CONFIGS = [(32, 32), (64, 32), (96, 32), (128, 32), (24, 8), (32, 8), (1, 8)]
LAYERS, EPS = 10, 1e-6


class Step:
    """One layer's matrices, larger than the L2 together, so that each layer of a graph reads them anew."""

    def __init__(self, rows, slots, ragged=False):
        g = torch.Generator(device=dev).manual_seed(rows * 100 + slots + ragged)
        self.r = r = lambda *s, k=1.0: (torch.randn(*s, device=dev, generator=g) * k).to(bf)
        used = np.arange(rows, dtype=np.int32) * 7 % slots
        if ragged and rows > 1:
            used[::5] = -1
        order = SortedRows.of(used)
        tiles = np.empty((3, most_tiles(rows, slots)), dtype=np.int32)
        order.write_tiles(tile_rows(rows), tiles)
        to = lambda a: torch.from_numpy(a).to(dev)
        self.rows, self.batch = rows, AdapterBatch(to(used), to(order.order), to(tiles), tile_rows(rows))
        self.start, self.scale, self.attn = r(rows, H), r(H), r(rows, H)
        self.stream = self.start.clone()
        self.w, self.joint, self.s = {}, {}, {}
        widths = [len(sizes) + 2 for _, sizes in MATRICES.values()]
        table = torch.zeros(slots, sum(widths) * 36, dtype=torch.int32, device=dev)  # as a model has it
        for (n, (inputs, sizes)), part in zip(MATRICES.items(), table.split(widths * 36, dim=1)):
            outputs, feats = len(sizes), sum(sizes)
            both = r(feats + slots * outputs * RANK, inputs, k=inputs**-0.5)
            self.joint[n], self.w[n] = both, both[:feats]
            b, bias = r(slots, RANK, feats, k=0.25), r(slots, feats)
            for slot in range(slots):
                rank = (RANK, 5, 0, RANK)[slot % 4] if ragged else RANK
                part[slot, : outputs + 1] = torch.arange(outputs + 1) * rank
                part[slot, outputs + 1] = int(ragged and slot % 3 == 1)
                b[slot, rank:] = 3e4  # finite: some variants multiply it by zero
                both[feats + slot * outputs * RANK + outputs * rank : feats + (slot + 1) * outputs * RANK] = torch.nan
            cols = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=dev)
            self.s[n] = AdapterSlots(both[feats:].view(slots, outputs * RANK, inputs), b, bias, part[:, : outputs + 1],
                                     part[:, outputs + 1], cols, tuple(sizes), [(RANK,) * outputs] * slots, [False] * slots)

    def both(self, n, x):
        if self.rows <= 2:
            return gemv_and_shrink(x, self.w[n], None, self.s[n], self.batch)
        y, feats = F.linear(x, self.joint[n]), len(self.w[n])
        return y[:, :feats], y[None, :, feats:]

    def put(self, n, x):
        p, h = self.both(n, x)
        if not p.is_contiguous():
            return expanded(h, self.s[n], self.batch, p)
        expand(h, self.s[n], self.batch, p)
        return p

    def today(self):
        delta = None
        for _ in range(LAYERS):
            self.put("qkv", add_rms_norm(self.stream, delta, self.scale, EPS))
            x = add_rms_norm(self.stream, self.put("o", self.attn), self.scale, EPS)
            p, h = self.both("gate_up", x)
            delta = self.put("down", expand_gated(h, self.s["gate_up"], self.batch, p, Activation.SILU))
        return add_rms_norm(self.stream, delta, self.scale, EPS)

    def fused(self, add):
        delta = None
        for _ in range(LAYERS):
            if delta is None:
                x = add_rms_norm(self.stream, None, self.scale, EPS)
            else:
                x = add(self.stream, *delta, self.s["down"], self.batch, self.scale, EPS)
            self.put("qkv", x)
            x = add(self.stream, *self.both("o", self.attn), self.s["o"], self.batch, self.scale, EPS)
            p, h = self.both("gate_up", x)
            delta = self.both("down", expand_gated(h, self.s["gate_up"], self.batch, p, Activation.SILU))
        return add(self.stream, *delta, self.s["down"], self.batch, self.scale, EPS)

    def without(self):
        delta, few = None, self.rows <= 2
        linear = (lambda x, w: gemv(x, w, None)) if few else F.linear
        for _ in range(LAYERS):
            linear(add_rms_norm(self.stream, delta, self.scale, EPS), self.w["qkv"])
            x = add_rms_norm(self.stream, linear(self.attn, self.w["o"]), self.scale, EPS)
            z = gemv(x, self.w["gate_up"], None, Activation.SILU) if few else act_and_mul(F.linear(x, self.w["gate_up"]), Activation.SILU)
            delta = linear(z, self.w["down"])
        return add_rms_norm(self.stream, delta, self.scale, EPS)


def variant(module, features, held_bytes):
    """The launch with other warps, and another part of `b` asked for before the product is done."""
    def add(*args):
        module._FEATURES, module._HELD_BYTES = features, held_bytes
        return module.add_adapted_norm(*args)
    return add


FUSED = {
    "16 warps": variant(held, 8, 256),
    "16 warps, all ranks": variant(every, 8, 256),
    "8 warps": variant(held, 16, 512),
    "8 warps, all ranks": variant(every, 16, 512),
    "8 warps, half held": variant(held, 16, 256),
}


def exact(step, n, p, h, stream, scale):
    """The sum and the norm in float64, of the same product and `a x`; rounded where the layers round."""
    s, used = step.s[n], step.batch.slots.tolist()
    sums = p.double()
    for row, slot in enumerate(used):
        if slot >= 0:
            rank = int(s.starts[slot, 1])
            at = slot * RANK if h.shape[2] > RANK else 0
            sums[row] += h[0, row, at : at + rank].to(bf).double() @ s.b[slot, :rank].double()
            if int(s.is_biased[slot]):
                sums[row] += s.bias[slot].double()
    total = (stream.double() + sums.to(bf).double()).to(bf).double()
    normed = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
    return total, normed.to(bf).double() * scale.double()


def far(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check(rows, slots):
    began, bad, seen = time.time(), 0, []
    turn = CONFIGS.index((rows, slots))  # what one process compiles, the others find on disk
    for ragged in (False, True):
        step = Step(rows, slots, ragged)
        for n, inputs in (("o", H), ("down", I)):
            p, h = step.both(n, step.r(rows, inputs))
            before = step.start.clone()
            wanted = exact(step, n, p, h, before, step.scale)

            def today(stream, p, h, s, batch, scale, eps):
                if not p.is_contiguous():
                    return add_rms_norm(stream, expanded(h, s, batch, p), scale, eps)
                q = p.clone()
                expand(h, s, batch, q)
                return add_rms_norm(stream, q, scale, eps)

            results, ways = {}, [*FUSED.items(), ("today", today)]
            for name, add in (ways * 2)[turn % len(ways) :][: len(ways)]:
                for again in range(2):
                    stream = before.clone()
                    found = add(stream, p, h, step.s[n], step.batch, step.scale, EPS)
                    torch.cuda.synchronize()
                    errors = [far(x, y) for x, y in zip((stream, found), wanted)]
                    if not all(e < 4e-3 for e in errors):
                        bad += 1
                        print(f"  {rows} rows {slots} slots {n} ragged={ragged} {name}: WRONG {errors}")
                    results.setdefault(name, []).append((stream.clone(), found, errors))
                same = all(torch.equal(x, y) for x, y in zip(results[name][0][:2], results[name][1][:2]))
                if not same:
                    bad += 1
                    print(f"  {rows} rows {slots} slots {n} {name}: two runs DIFFER")
            seen.append(f"{results['today'][0][2][1]:.1e}/{results['16 warps'][0][2][1]:.1e}")
    step = Step(rows, slots)
    for run in (step.without, step.today, *(lambda add=add: step.fused(add) for add in FUSED.values())):
        step.stream.copy_(step.start)
        found = run()
        if not torch.isfinite(found).all():
            bad += 1
            print(f"  {rows} rows {slots} slots: NOT FINITE")
    torch.cuda.synchronize()
    print(f"{rows:4} rows {slots:3} slots: {'BAD' if bad else 'right'}; norm's error today/fused {' '.join(seen)}; {time.time() - began:.1f} s", flush=True)
    return bad


def measure():
    print(f"us a layer over {LAYERS} layers in a graph, medians; +: beside `without`; x: the quartiles' span")
    for rows, slots in CONFIGS:
        step, graphs = Step(rows, slots), {}
        runs = {"without": step.without, "today": step.today, **{n: (lambda add=add: step.fused(add)) for n, add in FUSED.items()}}
        for name, run in runs.items():
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.stream.copy_(step.start)
                run()
            graphs[name] = graph
        times = {name: [] for name in graphs}
        for turn in range(21):
            for name, graph in graphs.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                a.record(); graph.replay(); b.record(); b.synchronize()
                times[name].append(1000 / LAYERS * a.elapsed_time(b))
        median = {name: statistics.median(t) for name, t in times.items()}
        spread = {n: statistics.quantiles(t, n=4)[2] - statistics.quantiles(t, n=4)[0] for n, t in times.items()}
        base, today = median["without"], median["today"]
        print(f"{rows:4} rows {slots:3} slots: without {base:.1f}, today +{today - base:.1f} (x {spread['today']:.1f})")
        for name in FUSED:
            print(f"      {name:22} +{median[name] - base:5.1f}   {today - median[name]:5.1f} saved (x {spread[name]:.1f})", flush=True)
        del graphs, step


if sys.argv[1] == "check":
    sys.exit(bool(check(int(sys.argv[2]), int(sys.argv[3]))))
measure()
