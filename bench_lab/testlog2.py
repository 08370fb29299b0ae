import sys, torch
sys.path.insert(0, "bench_lab")
import narrow2log as narrowlog, narrow2, test8
from quire.kernels.triton.experts import hopper_narrow
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts.gather import by_expert
from quire.kernels.triton.experts.order import sort_by_expert
D = "cuda"
torch.manual_seed(0)
E, H, F, tokens = 32, 2880, 2880, 256
act = ClampedSwiGLU(1.702, 7.0)
experts = torch.randn(tokens, E, device=D).topk(4, 1).indices.int()
blocks = sort_by_expert(experts, E, 64)
counts = torch.bincount(experts.flatten().long(), minlength=E).tolist()
print("counts", sorted(counts))
x = torch.randn(tokens, H, device=D).bfloat16()
rows = by_expert(x, blocks, 4)
def old_w(R):
    codes = torch.randint(-2**15, 2**15, (E, R, 736), device=D, dtype=torch.int16)
    words = torch.randint(0, 3, (E, 23, R, 4), device=D, dtype=torch.uint8).add_(118).view(torch.int32)[..., 0].contiguous()
    return FourBitExperts(codes, words)
o1, o2 = old_w(2 * F), old_w(H)
b1 = torch.randn(E, 2 * F, device=D).bfloat16(); b2 = torch.randn(E, H, device=D).bfloat16()
h = torch.randn_like(rows)
la, lb = (torch.zeros(132 * 4 * 256, dtype=torch.int32, device=D) for _ in range(2))
for _ in range(20):
    narrowlog.product(rows, o1, blocks, act, b1, la)
    narrowlog.product(h, o2, blocks, None, b2, lb)
torch.cuda.synchronize()
from statistics import mean
def show(log, name):
    v = log.view(132, 4, 256).cpu()
    g0 = v[:, :, 3].min().item()
    gs = (v[:, :, 3] - g0).float(); ge = (v[:, :, 4] - g0).float()
    span = (v[:, :, 2] - v[:, :, 0]).float()
    print(name, "start ns", gs.min().item(), gs.mean().item(), gs.max().item(), "end ns", ge.min().item(), ge.mean().item(), ge.max().item(), "MHz", (span.mean() / (ge - gs).mean() * 1000).item())
    d = {}
    for p in range(132):
        for w in range(4):
            r = v[p, w].tolist()
            for i in range(r[1]):
                a, b, c, k = r[8 + 4 * i: 12 + 4 * i]
                pairs, k = k % 256, min(k // 256, 4)
                if w < k and k == 4: d.setdefault((i == 0, pairs <= 32), []).append(c - a)
    for k in sorted(d): print("   (first, small)", k, len(d[k]), round(mean(d[k])), min(d[k]), max(d[k]))
    for p in range(0, 132, 11):
        r = v[p, 0].tolist()
        print("  ", p, [(r[8+4*i+2]-r[8+4*i], r[8+4*i+3] % 256) for i in range(r[1])])
show(la, "gated"); show(lb, "plain")
