import sys, time, torch
sys.path.insert(0, "bench_lab")
from quire.kernels.triton import TritonBackend
from quire.kernels.triton.experts import mlps as M
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.experts import ExpertMLPs, ExpertMatrices, Routing
from quire.kernels.four_bits import FourBitExperts
D = "cuda"
torch.manual_seed(0)
E, H, F = 32, 2880, 2880
def old_w(R):
    codes = torch.randint(-2**15, 2**15, (E, R, 736), device=D, dtype=torch.int16)
    words = torch.randint(0, 3, (E, 23, R, 4), device=D, dtype=torch.uint8).add_(118).view(torch.int32)[..., 0].contiguous()
    return FourBitExperts(codes, words)
def mat(R): return ExpertMatrices(None, None, torch.randn(E, R, device=D).bfloat16(), old_w(R))
mlps = ExpertMLPs(E, mat(2 * F), ClampedSwiGLU(1.702, 7.0), mat(H))
backend = TritonBackend()
for tokens in (96, 128, 160, 176, 192, 224, 256, 320, 448, 512):
    w, e = torch.randn(tokens, E, device=D).topk(4, 1)
    r = Routing(e.int(), w.softmax(1))
    x = torch.randn(tokens, H, device=D).bfloat16()
    line = []
    many = [(Routing(*(lambda w, e: (e.int(), w.softmax(1)))(*torch.randn(tokens, E, device=D).topk(4, 1))), torch.randn(tokens, H, device=D).bfloat16()) for _ in range(20)]
    for block in (None, 16, 32, 64, 128):
        if (block == 16) or (block == 32 and tokens > 256) or (block == 128 and tokens < 448) or (block is None) or (block == 64 and tokens < 90): continue
        M.block_on_hopper = lambda pairs, b=block: b
        f = lambda: backend.experts(x, r, mlps)
        f(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for r, x in many: f()
        t = time.time()
        while time.time() - t < 0.25: g.replay(); torch.cuda.synchronize()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); [g.replay() for _ in range(10)]; b.record(); torch.cuda.synchronize()
        line.append((block, round(a.elapsed_time(b) * 5, 1)))
    print(tokens, line, flush=True)
