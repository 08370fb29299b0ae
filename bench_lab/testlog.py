import sys, torch
sys.path.insert(0, "bench_lab")
import narrowlog, narrow2, test8
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
    sums, fin, first, gap = {}, {}, [], []
    tot_sum = tot_fin = 0
    per = []
    for p in range(132):
        for w in range(4):
            r = v[p, w].tolist(); n = r[1]
            prev = r[0]
            for i in range(n):
                a, b, c, k = r[8 + 4 * i: 12 + 4 * i]
                k = min(k, 4)
                if w < k:
                    (first if i == 0 else sums.setdefault(k, [])).append(b - a)
                    fin.setdefault(k, []).append(c - b)
                    tot_sum += b - a; tot_fin += c - b
                else:
                    sums.setdefault(("idle", k), []).append(c - a)
                gap.append(a - prev); prev = c
            per.append(n)
    print("  groups a program", min(per), mean(per), max(per), "span cycles", span.mean().item(), "first group", mean(first) if first else 0)
    for k in sums: print("   active", k, "n", len(sums[k]), "sums", round(mean(sums[k])))
    for k in fin: print("   finish", k, round(mean(fin[k])))
    print("   total a warpgroup: sums", tot_sum / 528, "finish", tot_fin / 528, "gap", sum(gap) / 528)
show(la, "gated"); show(lb, "plain")
def A(m):
    def f():
        m.product(rows, o1, blocks, act, b1); m.product(h, o2, blocks, None, b2)
    return f
a, b = hopper_narrow.product(rows, o1, blocks, act, b1), narrow2.product(rows, o1, blocks, act, b1)
print("same", torch.equal(a, b), (a.float() - b.float()).abs().max().item())
cold, hot = test8.hot([A(hopper_narrow), A(narrow2)], rounds=2, secs=0.8)
for n, c, o in zip(["now", "two sizes"], cold, hot):
    print(n, "cold", [round(v, 1) for v in c], "hot", [round(v, 1) for v in o], flush=True)
# zeros behind blocks, by hand: each expert's tokens at 64 * its number
if len(sys.argv) > 1:
    pass
