"""Tiles of fp8 experts by rows, at 64 to 256 tokens: µs of each product."""
import itertools, sys, time, torch
from quire.kernels.activation import Activation
from quire.kernels.codes import BlockScales, CodeFormat
from quire.kernels.experts import CodedExperts
from quire.kernels.triton.codes.quantise import quantise
from quire.kernels.triton.experts import grouped
from quire.kernels.triton.experts.order import sort_by_expert
from quire.kernels.triton.experts.tiles import Tile
t0 = time.time()
E, K, H, F, L = 128, 8, 2048, 768, 3
dev = "cuda"
def codes(rows, cols):
    w = torch.randint(0, 120, (E, rows, cols), dtype=torch.uint8, device=dev).view(torch.float8_e4m3fn)
    return CodedExperts(w, BlockScales(torch.rand(E * rows, 1, device=dev), 1, cols))
gates, downs = [codes(2 * F, H) for _ in range(L)], [codes(H, F) for _ in range(L)]
form = CodeFormat()
tokens = int(sys.argv[1])
def measure(f, n=30):
    try:
        f(0); torch.cuda.synchronize()
    except Exception as e:
        return float("nan")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): f(i % L)
    g.replay(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = 1e9
    for _ in range(5):
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); best = min(best, a.elapsed_time(b))
    return best / n * 1e3
torch.manual_seed(0)
experts = torch.randn(tokens, E, device=dev).topk(K).indices
x = quantise(torch.randn(tokens, H, device=dev, dtype=torch.bfloat16), form)
hid = quantise(torch.randn(tokens * K, F, device=dev, dtype=torch.bfloat16), form)
res = []
deadline = t0 + float(sys.argv[2])
todo = [(b, c, i, w, s) for b in (32, 16) for c in (64, 128) for i in (128, 256) for w in (4, 8) for s in (3, 4, 5, 6) ]
def fits(b, c, i, s, halves): return (halves * c + b) * i * s <= 220 << 10
for which in ("gate", "down"):
    out = []
    for b, c, i, w, s in todo:
        if not fits(b, c, i, s, 2 if which == "gate" else 1): continue
        if b == 16 and (w == 8 or i == 256): continue
        if time.time() > (deadline if which == "down" else t0 + float(sys.argv[2]) * .55): break
        blocks = sort_by_expert(experts, E, b)
        tile = Tile(c, i, w, s)
        if which == "gate":
            us = measure(lambda n: grouped.gated_product(x, gates[n], blocks, K, Activation.SILU, None, tile))
        else:
            us = measure(lambda n: grouped.product(hid, downs[n], blocks, None, tile))
        out.append((us, b, tuple(tile)))
    out.sort(key=lambda r: (r[0] != r[0], r[0]))
    limit = (E * 2 * F * H if which == "gate" else E * F * H) / 4.28e6
    print(which, tokens, f"limit {limit:.1f}", len(out), "tried")
    for us, b, t in out[:8] + [r for r in out if r[2] in ((128, 128, 4, 3), (128, 128, 8, 4))]: print(f"   {us:7.1f} µs {100 * limit / us:5.1f} %  block {b} {t}", flush=True)
