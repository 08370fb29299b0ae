"""One tree's narrow kernels: lab.py TREE [compile]. Figures in µs; exact against the kernel for all GPUs."""
import sys, os, statistics
tree, only = sys.argv[1], sys.argv[2:] == ["compile"]
sys.path.insert(0, f"{tree}/src")
import torch
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.experts import ExpertMatrices, ExpertMLPs, Routing
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts import grouped_fours, hopper_narrow, hopper_fours, mlps as m
from quire.kernels.triton.experts.order import sort_by_expert
from quire.kernels.triton.experts.gather import by_expert
from quire.kernels.triton.experts.combine import sum_of_chosen
bf, dev = torch.bfloat16, "cuda"
E, D, K = 32, 2880, 4
def experts(rows, seed):
    g = torch.Generator(device=dev).manual_seed(seed)
    codes = torch.randint(-32768, 32768, (E, rows, 736), dtype=torch.int16, device=dev, generator=g)
    words = torch.randint(118, 124, (E, 23, rows, 4), dtype=torch.uint8, device=dev, generator=g).view(torch.int32).view(E, 23, rows)
    return FourBitExperts(codes, words, None, None)
sets = []
for s in range(2):
    b1, b2 = (torch.randn(E, n, device=dev).to(bf) for n in (2 * D, D))
    sets.append(ExpertMLPs(E, ExpertMatrices(None, None, b1, experts(2 * D, 2 * s)), ClampedSwiGLU(1.702, 7.0), ExpertMatrices(None, None, b2, experts(D, 2 * s + 1))))
def timed(calls, n=12, reps=7):
    for c in calls: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): calls[i % len(calls)]()
    g.replay(); torch.cuda.synchronize()
    out = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        out.append(a.elapsed_time(b) * 1000 / n)
    return statistics.median(out)
def pick(block): return hopper_narrow if block <= 64 else hopper_fours
ablated = os.path.exists(f"{tree}/ABLATED")
for tokens, blocks in ((16, (16,)), (64, (16, 32)), (96, (32,)), (128, (32, 64)), (192, (32, 64)), (256, (32, 64)), (512, (128,)), (1024, (128,)), (8192, (128,))):
    if ablated and tokens not in (128, 256): continue
    torch.manual_seed(tokens)
    x = torch.randn(tokens, D, device=dev).to(bf)
    scores = torch.randn(tokens, E, device=dev) + torch.randn(E, device=dev) * 0.3
    top = scores.topk(K, dim=1)
    routing = Routing(top.indices, top.values.softmax(1))
    ref = None
    for block in blocks:
        def whole(mlps): return m._of_mxfp4_on_hopper(x, routing, mlps, mlps.gate_up.packed, mlps.down.packed, block)
        got = whole(sets[0])
        if only: continue
        if ref is None and not ablated:
            tiles = m.tiles_of("four bits", D, D, 2, routing, sets[0]); bl = m.sorted_pairs(routing, sets[0], tiles)
            hid = grouped_fours.gated_product(x, sets[0].gate_up.packed, bl, K, sets[0].activation, sets[0].gate_up.bias, tiles.gate_up)
            ref = sum_of_chosen(grouped_fours.product(hid, sets[0].down.packed, bl, sets[0].down.bias, tiles.down), routing, E)
        err = float((got.float() - ref.float()).abs().max() / ref.float().abs().max()) if ref is not None else -1
        bl = sort_by_expert(routing.experts, E, block); toks = by_expert(x, bl, K)
        hid = pick(block).product(toks, sets[0].gate_up.packed, bl, sets[0].activation, sets[0].gate_up.bias)
        one = timed([lambda s=s: pick(block).product(toks, s.gate_up.packed, bl, s.activation, s.gate_up.bias) for s in sets])
        two = timed([lambda s=s: pick(block).product(hid, s.down.packed, bl, None, s.down.bias) for s in sets])
        both = timed([lambda s=s: whole(s) for s in sets])
        live = int((bl.table[0] >= 0).sum())
        print(f"{os.path.basename(tree):10} tokens {tokens:4} block {block:3} ({live} blocks): {one:6.1f} + {two:6.1f}, whole {both:6.1f}  err {err:.4f}", flush=True)
