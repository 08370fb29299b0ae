import os, sys, time, traceback
os.environ["TRITON_CACHE_DIR"] = f"/tmp/tri/cache-{os.getpid()}"
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
KEPT = []
def warm(self, *a, grid=None, warmup=False, **k):
    t = time.time()
    try:
        kernel = run(self, *a, grid=grid, warmup=True, **k)
        KEPT.append(kernel)
        print("   ", self.__name__, "ok", round(time.time() - t, 1), "shared", kernel.metadata.shared, flush=True)
        import subprocess, re, glob
        cub = kernel.asm.get("cubin")
        open("/tmp/tri/k.cubin", "wb").write(cub)
        open("/tmp/tri/k.ptx", "w").write(kernel.asm["ptx"])
    except Exception as e:
        c = e.__cause__
        while c is not None: print("CAUSE", c); c = c.__cause__
        print("   FAILED", self.__name__, str(e)[:9000], flush=True)
    return None
JITFunction.run = warm
torch.cuda.get_device_capability = lambda *a: (9, 0)
class P: multi_processor_count = 132
torch.cuda.get_device_properties = lambda *a: P
print("triton", triton.__version__)
