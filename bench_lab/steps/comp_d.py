import os, sys, time, re
sys.path.insert(0,os.environ["TRITON36"])
os.environ["TRITON_CACHE_DIR"]="build/tcache"
os.environ["TRITON_ALWAYS_COMPILE"]="1"
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
(rd.driver if hasattr(rd,"driver") else rd).set_active(Fake())
from triton.runtime.jit import JITFunction
run = JITFunction.run
OUT=[]
import subprocess, tempfile
def regs(cubin):
    p="build/tcache/k.cubin"; open(p,"wb").write(cubin)
    base=os.environ["TRITON36"]+"/triton/backends/nvidia/bin/"
    r=subprocess.run([base+"cuobjdump","-res-usage",p],capture_output=True,text=True)
    m=re.search(r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+)",r.stdout+r.stderr)
    s=subprocess.run([base+"nvdisasm","-c",p],capture_output=True,text=True)
    return (m.groups() if m else r.stdout+r.stderr), s.stdout
def warm(self, *a, grid=None, warmup=False, **k):
    t=time.time()
    kernel = run(self, *a, grid=grid, warmup=True, **k)
    r, sass = regs(kernel.asm["cubin"])
    ptx=kernel.asm["ptx"]
    print("  ",self.__name__,"regs/stack/shared",r,kernel.metadata.shared,"%.1fs"%(time.time()-t),
      {k:len(re.findall(k,ptx)) for k in ("ld.global","ld.global.*v4.b32","st.shared","ld.shared|ldmatrix","bar.sync","mma.sync","wgmma.mma","shfl")},flush=True)
    n=os.environ.get("DUMP")
    if n:
        open(n+".ptx","w").write(ptx); open(n+".sass","w").write(sass); open(n+".ttgir","w").write(kernel.asm["ttgir"])
JITFunction.run = warm
torch.cuda.get_device_capability = lambda *a: (9, 0)
class P: multi_processor_count = 132
torch.cuda.get_device_properties = lambda *a: P
import quire.kernels.triton.gguf.few as few
few.pdl_launch=lambda d:{"PDL":True,"launch_pdl":True}
import quire.kernels.triton.gguf.few_digits as fd
fd.pdl_launch=few.pdl_launch
from quire.kernels.gguf_tiles import *
def fake(type_, rows, cols):
    b=TYPES[type_]
    return to_tiles(type_, torch.zeros(rows, cols//b.values*b.bytes,dtype=torch.uint8))
if __name__=="__main__":
    print(triton.__version__)
    what=sys.argv[1]; types=sys.argv[2].split(","); rows=[int(r) for r in sys.argv[3].split(",")]
    for ty in types:
        K=int(os.environ.get("K","4096")); m=fake(ty,256,K)
        for r in rows:
            for dt in (torch.bfloat16,torch.float16)[:int(os.environ.get("DT","1"))]:
                x=torch.zeros(r,K,dtype=dt); out=torch.zeros(r,256,dtype=dt)
                print(ty,r,dt)
                try:
                    if what=="few": few.few_rows(x,m,None,out,True)
                    elif what=="digits":
                        sh=os.environ.get("SHAPE")
                        fd.few_rows(x,m,None,out,True,fd.Shape(*map(int,sh.split(","))) if sh else None)
                    elif what=="many":
                        import quire.kernels.triton.gguf.many as many
                        many.many_rows(x,m,None,out,True)
                    else:
                        from quire.kernels.triton.gguf.rows import dequantise
                        dequantise(m,dt)
                except Exception as e:
                    import traceback; traceback.print_exc(limit=-2)
