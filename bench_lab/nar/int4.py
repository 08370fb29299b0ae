"""int4 products of a layer of Qwen3-8B: int4.py TREE. µs of the four products, and cuBLAS's in bf16."""
import sys, os, statistics
tree = sys.argv[1]; sys.path.insert(0, f"{tree}/src")
import torch
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.int4 import hopper_many
bf, dev = torch.bfloat16, "cuda"
shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
mats = []
for copy in range(2):
    mats.append([Int4Tiles(torch.randint(-32768, 32768, (f, d // 4), dtype=torch.int16, device=dev), (torch.rand(f, d // 128, device=dev) * .01).to(bf), None, 128) for f, d in shapes])
dense = [[torch.randn(f, d, device=dev, dtype=bf) for f, d in shapes] for _ in range(2)]
def timed(calls, n=8, reps=7):
    for c in calls: c()
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n): calls[i % len(calls)]()
    g.replay(); torch.cuda.synchronize(); out = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); out.append(a.elapsed_time(b) * 1000 / n)
    return statistics.median(out)
for rows in (64, 128, 160, 192, 256, 512, 2048):
    xs = [torch.randn(rows, d, device=dev).to(bf) for _, d in shapes]
    each = [timed([lambda m=m, i=i: hopper_many.many_rows(xs[i], m[i], None) for m in mats]) for i in range(4)]
    plain = [timed([lambda w=w, i=i: torch.nn.functional.linear(xs[i], w[i]) for w in dense]) for i in range(4)] if tree.endswith("base") else [0] * 4
    check = [float(hopper_many.many_rows(xs[i], mats[0][i], None).float().abs().mean()) for i in range(4)]
    print(f"{os.path.basename(tree):8} rows {rows:4}: " + " + ".join(f"{t:.1f}" for t in each) + f" = {sum(each):.1f}   bf16 {sum(plain):.1f}   mean {sum(check):.6f}", flush=True)
