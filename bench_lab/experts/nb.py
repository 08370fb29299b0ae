"""nb.py TOKENS:BLOCK,.. variants: two products of gpt-oss-20b's experts, in turns."""
import sys, os, importlib, torch
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from quire.kernels.four_bits import *
from quire.kernels.triton.experts.order import sort_by_expert
from quire.kernels.triton.experts.gather import by_expert
from quire.kernels.activation import ClampedSwiGLU
cases = [tuple(map(int, c.split(":"))) for c in sys.argv[1].split(",")]; names = sys.argv[2].split(",")
E, H, F, K, L = 32, 2880, 2880, 4, int(os.environ.get("L", 4))
g = torch.Generator("cuda").manual_seed(0)
def experts(rows, cols):
    q = quarter_of(cols)
    codes = torch.randint(-32768, 32768, (E, rows, q), generator=g, device="cuda", dtype=torch.int32).to(torch.int16)
    words = torch.randint(118, 126, (E, q // 32, rows, 4), generator=g, device="cuda", dtype=torch.uint8).view(torch.int32).squeeze(-1)
    return FourBitExperts(codes, words)
def linear(w, gated):
    codes, words = w[:2]; e, r, q = codes.shape; G = q // 32
    def tiles(c):  # [e, r, k] -> [e, u, 64, k]
        k = c.shape[2]
        if gated: halves = [h.reshape(e, -1, 4, 8, k) for h in c.chunk(2, 1)]
        else: halves = c.reshape(e, -1, 2, 4, 8, k).unbind(2)
        return torch.stack(halves, 3).reshape(e, -1, 64, k)
    c = tiles(codes).unflatten(3, (G, 32)).transpose(2, 3).contiguous()
    s = tiles(words.transpose(1, 2)).transpose(2, 3).contiguous()
    return FourBitExperts(c, s)
layers = [(experts(2 * F, H), experts(H, F)) for _ in range(L)]
lins = [(linear(a, True), linear(b, False)) for a, b in layers] if any('lin' in v for v in names) else None
bias = torch.randn(E, 2 * F, device="cuda", generator=g).bfloat16(), torch.randn(E, H, device="cuda", generator=g).bfloat16()
act = ClampedSwiGLU(1.702, 7.0)
mods = {v: importlib.import_module("n_" + v) for v in names}
compile_only = "COMPILE" in os.environ
for tokens, block in cases:
    x = torch.randn(tokens, H, device="cuda", generator=g).bfloat16()
    graphs, outs = {}, {}
    prep = []
    for l in range(L):
        ch = torch.randn(tokens, E, device="cuda", generator=g).topk(K).indices
        bl = sort_by_expert(ch, E, block); tt = by_expert(x, bl, K); prep.append((bl, tt, torch.cat([tt, tt[:64]])))
    for v, m in mods.items():
        def call(which=3):
            r = []
            for (gu, dn), (bl, t) in zip(lins if 'lin' in v else layers, [(z[0], z[2 if 'padx' in v else 1]) for z in prep]):
                h = m.product(t, gu, bl, act, bias[0]) if which & 1 else t
                o = m.product(h, dn, bl, None, bias[1]) if which & 2 else h
                r.append((h, o))
            return r
        try:
            call(); torch.cuda.synchronize()
        except Exception as e:
            print(v, "FAILED", repr(e)[:300], flush=True); continue
        if compile_only: continue
        for which in (3, 1, 2):
            gr = torch.cuda.CUDAGraph()
            with torch.cuda.graph(gr): o = call(which)
            graphs[v, which] = gr
            if which == 3: outs[v] = o
    if compile_only: continue
    t = {k: [] for k in graphs}
    for _ in range(3):
        for gr in graphs.values(): gr.replay()
    for rnd in range(12):
        for k, gr in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            gr.replay(); a.record(); [gr.replay() for _ in range(3)]; b.record(); b.synchronize(); t[k].append(a.elapsed_time(b) / 3 / L * 1e3)
    for v in names:
        if (v, 3) not in t: continue
        med = {w: sorted(t[v, w])[6] for w in (3, 1, 2)}
        same = all(torch.equal(p[1][:len(q[1])], q[1]) for p, q in zip(outs[v], outs[names[0]])) 
        print(f"{tokens:5d} block {block:3d} {v:10s} both {med[3]:7.1f}  first {med[1]:7.1f} second {med[2]:7.1f}  {'same' if same else 'DIFFERS'}", flush=True)
    del graphs, outs
os._exit(0)
