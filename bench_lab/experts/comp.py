"""Compile variants for sm_90 without a GPU. TRITON36, names."""
import os, sys
sys.argv, names = [sys.argv[0]], sys.argv[1:]
exec(open("bench_lab/steps/comp_a.py").read().split("import quire.kernels.triton.gguf.few")[0])
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import importlib
import quire.kernels.triton.pdl as pdl
import quire.kernels.triton.processors as pr
from quire.kernels.four_bits import *
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.activation import *
def lin_experts(F, gated, h):
    u = F // 32 if gated else F // 64
    return FourBitExperts(torch.zeros(2, u, quarter_of(h) // 32, 64, 32, dtype=torch.int16), torch.zeros(2, u, quarter_of(h) // 32, 64, dtype=torch.int32))
for v in names:
    m = importlib.import_module("n_" + v)
    m.DBG = torch.zeros(20 * 256, dtype=torch.int32); m.pdl_launch = lambda d: {"PDL": True, "launch_pdl": True}; m.processors = lambda d, **k: 132
    B = int(os.environ.get("B", 64)); h = 2880
    for gated in (True, False):
        F = 256
        w = lin_experts(F, gated, h) if "lin" in v else FourBitExperts(torch.zeros(2, F * (2 if gated else 1), quarter_of(h), dtype=torch.int16), torch.zeros(2, quarter_of(h) // 32, F * (2 if gated else 1), dtype=torch.int32))
        x = torch.zeros(128, 4 * quarter_of(h) if 0 else h, dtype=torch.bfloat16)
        bl = Blocks(torch.zeros(128, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), B)
        print(v, gated)
        try: m.product(x, w, bl, ClampedSwiGLU(1.702, 7.0) if gated else None, torch.zeros(2, F * (2 if gated else 1), dtype=torch.bfloat16))
        except Exception as e:
            print("FAILED", str(e)[-300:])
