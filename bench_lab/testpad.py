import sys; sys.path.insert(0, "bench_lab")
sys.argv = ["x", "0.1"]
import torch, test8
import old_hopper_narrow as old, one_hopper_narrow as one
import w8one, w8two
from quire.kernels.triton.experts.gather import by_expert, by_block
from quire.kernels.triton.experts.order import sort_by_expert
D = "cuda"
torch.manual_seed(0)
E, H, F = 32, 2880, 2880
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.four_bits import FourBitExperts
act = ClampedSwiGLU(1.702, 7.0)
def old_w(R):
    codes = torch.randint(-2**15, 2**15, (E, R, 736), device=D, dtype=torch.int16)
    words = torch.randint(0, 3, (E, 23, R, 4), device=D, dtype=torch.uint8).add_(118).view(torch.int32)[..., 0].contiguous()
    return FourBitExperts(codes, words)
o1, o2 = old_w(2 * F), old_w(H)
b1 = torch.randn(E, 2 * F, device=D).bfloat16(); b2 = torch.randn(E, H, device=D).bfloat16()
for tokens, block in ((256, 64), (192, 64), (128, 32)):
    experts = torch.randn(tokens, E, device=D).topk(4, 1).indices.int()
    blocks = sort_by_expert(experts, E, block)
    x = torch.randn(tokens, H, device=D).bfloat16()
    def f(m, g=by_block):
        r = g(x, blocks, 4); h = m.product(r, o1, blocks, act, b1); return m.product(h, o2, blocks, None, b2)
    outs = [f(old, by_expert), f(one), f(w8one), f(w8two)]
    cold, hot = test8.hot([lambda: f(old, by_expert), lambda: f(one), lambda: f(w8one), lambda: f(w8two)], rounds=2, secs=0.6)
    print(tokens, [torch.equal(outs[0], o) for o in outs], "blocks", int((blocks.table[0] >= 0).sum()), [("%.1f %.1f" % tuple(c), "%.1f %.1f" % tuple(h)) for c, h in zip(cold, hot)], flush=True)
