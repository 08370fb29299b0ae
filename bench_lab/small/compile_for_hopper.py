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
        found.append((self.__name__, f"{type(e).__name__}: {str(e)[:300]}", round(time.time() - t, 1)))
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
def dense():
    from quire.kernels.triton.attention.hopper import attend, attend_expanded
    from quire.kernels.triton.attention.dense import GATHERED_KEYS, ROWS
    from quire.kernels.scoring import Scoring
    for d in (128, 64):
        q = torch.zeros(1, 4, d, dtype=bf); kv = torch.zeros(1, GATHERED_KEYS, d, dtype=bf); jobs = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32)
        attend(q, kv, kv, jobs, 4, 0, Scoring(1.0), torch.empty_like(q))
    q = torch.zeros(1, 1, 192, dtype=bf); kv, kr = q.new_zeros(ROWS, 1, 256), q.new_zeros(ROWS, 64)
    attend_expanded(q, kv, kr, jobs, 1.0, q.new_empty(1, 1, 128))
def fp8():
    import inspect
    from quire.kernels.triton.attention import fp8_choice
    inspect.unwrap(fp8_choice._can_be_built)(cpu, bf)
def latent():
    import inspect
    from quire.kernels.triton.latent import choice
    inspect.unwrap(choice._can_be_built)(cpu, bf)
def many():
    sys.path.insert(0, "tests"); sys.path.insert(0, "tests/kernels")
    import test_triton_experts as t
    from quire.kernels.activation import ClampedSwiGLU
    from quire.kernels.experts import ExpertMatrices, ExpertMLPs
    from quire.kernels.triton.experts import mlps as m
    gating = ClampedSwiGLU(1.702, 7.0)
    x, routing = torch.randn(64, 512).to(bf), t.random_routing(64, "cpu")
    first, _ = t.random_fours(2 * 512, 512, "cpu", "mxfp4", bf); second, _ = t.random_fours(512, 512, "cpu", "mxfp4", bf)
    b1, b2 = torch.randn(t.COUNT, 1024).to(bf), torch.randn(t.COUNT, 512).to(bf)
    mlps = ExpertMLPs(t.COUNT, ExpertMatrices(None, None, b1, first), gating, ExpertMatrices(None, None, b2, second))
    for block in (16, 32, 64, 128):
        try: m._of_mxfp4_on_hopper(x, routing, mlps, first, second, block)
        except Exception: print("    wrapper:", traceback.format_exc(limit=-2)[-400:], flush=True)
def int4():
    sys.path.insert(0, "tests"); sys.path.insert(0, "tests/kernels")
    import test_int4 as t
    print([n for n in dir(t) if "rand" in n or "matri" in n or "tiles" in n])
    from quire.kernels.triton.int4 import hopper_many
    from quire.kernels.quantise import to_groups
def experts():
    sys.path.insert(0, "tests"); sys.path.insert(0, "tests/kernels")
    import test_triton_experts as t
    from quire.kernels.activation import ClampedSwiGLU
    from quire.kernels.triton.experts import hopper_few_fours
    x, routing = torch.randn(2, 2880).to(bf), t.random_routing(2, "cpu")
    gating = ClampedSwiGLU(1.702, 7.0)
    first, _ = t.random_fours(2 * 2880, 2880, "cpu", "mxfp4", bf); second, _ = t.random_fours(2880, 2880, "cpu", "mxfp4", bf)
    b1, b2 = torch.randn(t.COUNT, 5760).to(bf), torch.randn(t.COUNT, 2880).to(bf)
    between = hopper_few_fours.few_gated(x, first, routing, gating, b1, hopper_few_fours.Shape(4, 4, 1), True)
    hopper_few_fours.few_summed(between, second, routing, b2, hopper_few_fours.Shape(8, 2, 2), True)
    import inspect
    from quire.kernels.triton.experts import hopper_fours, hopper_narrow, order
    print(inspect.signature(hopper_narrow.narrow_product) if hasattr(hopper_narrow, "narrow_product") else [n for n in dir(hopper_narrow) if not n.startswith("_")][:40])
    print([n for n in dir(hopper_fours) if not n.startswith("_")][:40])
for n in sys.argv[1:]: section(n, globals()[n])
