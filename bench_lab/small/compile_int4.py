import os, sys, time, traceback
os.environ["TRITON_CACHE_DIR"] = f"triton-cache-{os.getpid()}"
import torch, triton
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
found = []
def warm(self, *a, grid=None, warmup=False, **k):
    t = time.time()
    try:
        kernel = run(self, *a, grid=grid, warmup=True, **k)
        found.append((self.__name__, "ok", round(time.time() - t, 1), kernel.metadata.shared, getattr(kernel, "n_regs", None)))
    except Exception as e:
        traceback.print_exc()
        found.append((self.__name__, f"{type(e).__name__}: {str(e)[:2500]}", round(time.time() - t, 1)))
    print("   ", *found[-1], flush=True)
    return None
JITFunction.run = warm
torch.cuda.get_device_capability = lambda *a: (9, 0)
class P: multi_processor_count = 132
torch.cuda.get_device_properties = lambda *a: P
print("triton", triton.__version__)
cpu, bf = torch.device("cpu"), torch.bfloat16
def section(name, fn):
    print(name, flush=True)
    try: fn()
    except Exception: print("    wrapper:", traceback.format_exc(limit=-3)[-500:], flush=True)

for m in ("int4.hopper_many","int4.combine"):
    mod=__import__("quire.kernels.triton."+m,fromlist=["x"]); mod.pdl_launch=lambda d:{"PDL":True,"launch_pdl":True}
def a():
    from quire.kernels.triton.int4 import hopper_many
    from quire.kernels.int4_tiles import Int4Tiles
    for rows in (32, 256):
        x=torch.zeros(rows,4096,dtype=bf)
        hopper_many.many_rows(x,Int4Tiles(torch.zeros(6144,1024,dtype=torch.int16),torch.zeros(6144//16,32,16,dtype=bf),None,128),None)
section("many",a)
