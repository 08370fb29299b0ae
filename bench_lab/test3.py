import sys, torch
sys.path.insert(0, "bench_lab")
import importlib, test8
from quire.kernels.triton.experts import hopper_narrow
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts.gather import by_expert
from quire.kernels.triton.experts.order import sort_by_expert
D = "cuda"
torch.manual_seed(0)
E, H, F = 32, 2880, 2880
act = ClampedSwiGLU(1.702, 7.0)
def old_w(R):
    codes = torch.randint(-2**15, 2**15, (E, R, 736), device=D, dtype=torch.int16)
    words = torch.randint(0, 3, (E, 23, R, 4), device=D, dtype=torch.uint8).add_(118).view(torch.int32)[..., 0].contiguous()
    return FourBitExperts(codes, words)
o1, o2 = old_w(2 * F), old_w(H)
b1 = torch.randn(E, 2 * F, device=D).bfloat16(); b2 = torch.randn(E, H, device=D).bfloat16()
mods = [hopper_narrow] + [importlib.import_module(n) for n in sys.argv[2:]]
for tokens, block in ((256, 64), (128, 32)):
    experts = torch.randn(tokens, E, device=D).topk(4, 1).indices.int()
    blocks = sort_by_expert(experts, E, block)
    x = torch.randn(tokens, H, device=D).bfloat16()
    rows = by_expert(x, blocks, 4)
    h = torch.randn_like(rows)
    want = [hopper_narrow.product(rows, o1, blocks, act, b1), hopper_narrow.product(h, o2, blocks, None, b2)]
    fns = []
    for m in mods:
        got = [m.product(rows, o1, blocks, act, b1), m.product(h, o2, blocks, None, b2)]
        print(m.__name__, [torch.equal(a, b) or (a.float() - b.float()).abs().max().item() for a, b in zip(got, want)], flush=True)
        fns.append(lambda m=m: m.product(rows, o1, blocks, act, b1))
        fns.append(lambda m=m: m.product(h, o2, blocks, None, b2))
        fns.append(lambda m=m: (m.product(rows, o1, blocks, act, b1), m.product(h, o2, blocks, None, b2)))
    cold, hot = test8.hot(fns, rounds=2, secs=float(sys.argv[1]))
    for i in range(len(mods)):
        print(tokens, mods[i].__name__.split(".")[-1], *["cold %.1f %.1f hot %.1f %.1f |" % (*cold[3 * i + k], *hot[3 * i + k]) for k in range(3)], flush=True)
