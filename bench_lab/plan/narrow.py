"""SASS of hopper_narrow for gpt-oss shapes. usage: narrow.py SRC OUT [block...]"""
import os, sys
src, outdir = sys.argv[1], sys.argv[2]
blocks = [int(b) for b in sys.argv[3:]] or [32]
sys.path[:0] = [src, "/tmp/lora-pkgs"]
os.environ["TRITON_CACHE_DIR"] = "/tmp/lt/cache"
import torch, triton, subprocess, pathlib
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
import triton.runtime.driver as rd
class Utils:
    def get_device_properties(self, i): return dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32, max_num_regs=65536, sm_clock_rate=1, mem_clock_rate=1, mem_bus_width=1)
class Fake(DriverBase):
    def __init__(self): self.utils = Utils()
    @classmethod
    def is_active(cls): return True
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def set_current_device(self, d): pass
    def get_current_stream(self, d=0): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_benchmarker(self): return None
    def map_python_to_cpp_type(self, ty): return ty
    def get_device_capability(self, d=0): return (9, 0)
    def launcher_cls(self, *a): return None
rd.driver.set_active(Fake()) if hasattr(rd, "driver") else rd.set_active(Fake())
from triton.runtime.jit import JITFunction
run = JITFunction.run
name = [None]
def warm(self, *a, grid=None, warmup=False, **k):
    kernel = run(self, *a, grid=grid, warmup=True, **k)
    if self.__name__ == "_multiply":
        p = pathlib.Path(outdir) / f"{name[0]}.cubin"; p.write_bytes(kernel.asm["cubin"])
        (pathlib.Path(outdir) / f"{name[0]}.ptx").write_text(kernel.asm["ptx"])
        sass = subprocess.run(["/tmp/lora-pkgs/triton/backends/nvidia/bin/nvdisasm", "-c", "-g" if False else "-c", str(p)], capture_output=True, text=True)
        (pathlib.Path(outdir) / f"{name[0]}.sass").write_text(sass.stdout)
        res = subprocess.run(["/tmp/lora-pkgs/triton/backends/nvidia/bin/cuobjdump", "-res-usage", str(p)], capture_output=True, text=True).stdout.strip().splitlines()[-1]
        print(name[0], kernel.metadata.shared, res, sass.stderr[:200])
    return None
JITFunction.run = warm
torch.cuda.get_device_capability = lambda *a: (9, 0)
class P: multi_processor_count = 132
torch.cuda.get_device_properties = lambda *a: P
pathlib.Path(outdir).mkdir(exist_ok=True)
from quire.kernels.triton.experts import hopper_narrow as h
from quire.kernels.triton.experts.order import Blocks
from quire.kernels.activation import ClampedSwiGLU
import inspect
from quire.kernels.four_bits import FourBitExperts
bf = torch.bfloat16
print(triton.__version__, FourBitExperts._fields, Blocks._fields if hasattr(Blocks, "_fields") else Blocks)
E, D, F = 2, 2880, 2880
def mats(rows):
    return FourBitExperts(torch.zeros(E, rows, D // 4, dtype=torch.int16), torch.zeros(E, D // 4 // 32, rows, dtype=torch.int32), *([None] * (len(FourBitExperts._fields) - 2)))
for b in blocks:
    x = torch.zeros(4 * b, D, dtype=bf)
    order = torch.zeros(4 * b, dtype=torch.int32); table = torch.zeros(3, 8, dtype=torch.int32)
    try: bl = Blocks(order=order, table=table, size=b, number=8)
    except TypeError: bl = Blocks(*[{"order": order, "table": table, "size": b, "number": 8}[f] for f in Blocks._fields])
    for gated in (True, False):
        name[0] = f"{'gate' if gated else 'down'}{b}"
        w = mats(2 * F if gated else D)
        h.product(x, w, bl, ClampedSwiGLU(1.702, 7.0) if gated else None, torch.zeros(E, 2 * F if gated else D, dtype=bf))
