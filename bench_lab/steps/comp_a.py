import os, sys, time, re
sys.path.insert(0,os.environ["TRITON36"])
os.environ["TRITON_CACHE_DIR"]="build/tcache_a_"+str(os.getpid()); os.makedirs(os.environ["TRITON_CACHE_DIR"],exist_ok=True)
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
    p=os.environ["TRITON_CACHE_DIR"]+"/k.cubin"; open(p,"wb").write(cubin)
    base=os.environ["TRITON36"]+"/triton/backends/nvidia/bin/"
    r=subprocess.run([base+"cuobjdump","-res-usage",p],capture_output=True,text=True)
    m=re.search(r"REG:(\d+).*?STACK:(\d+).*?SHARED:(\d+)",r.stdout+r.stderr)
    s=subprocess.run([base+"nvdisasm","-c",p],capture_output=True,text=True)
    return (m.groups() if m else r.stdout+r.stderr), s.stdout
def warm(self, *a, grid=None, warmup=False, **k):
    t=time.time(); print("   grid",grid)
    kernel = run(self, *a, grid=grid, warmup=True, **k)
    r, sass = regs(kernel.asm["cubin"])
    ptx=kernel.asm["ptx"]
    print("  ",self.__name__,"regs/stack/shared",r,kernel.metadata.shared,"%.1fs"%(time.time()-t),
      {k:len(re.findall(k,ptx)) for k in ("ld.global","ld.global.*v4.b32","st.shared","ld.shared|ldmatrix","bar.sync","mma.sync","wgmma.mma","shfl")},flush=True)
    n=os.environ.get("DUMP") if "combine" not in self.__name__ else None
    if n:
        open(n+".ptx","w").write(ptx); open(n+".sass","w").write(sass); open(n+".ttgir","w").write(kernel.asm["ttgir"])
JITFunction.run = warm
torch.cuda.get_device_capability = lambda *a: (9, 0)
class P: multi_processor_count = 132
torch.cuda.get_device_properties = lambda *a: P
import quire.kernels.triton.gguf.few as few
few.pdl_launch=lambda d:{"PDL":True,"launch_pdl":True}
from quire.kernels.gguf_tiles import *
def fake(type_, rows, cols):
    b=TYPES[type_]
    return to_tiles(type_, torch.zeros(rows, cols//b.values*b.bytes,dtype=torch.uint8))

def fake4(rows,cols,group,zeros):
    from quire.kernels.int4_tiles import Int4Tiles
    return Int4Tiles(torch.zeros(rows,cols//4,dtype=torch.int16),torch.zeros(rows,cols//group,dtype=torch.bfloat16 if DT==0 else torch.float16),torch.zeros(rows,cols//group,dtype=torch.uint8) if zeros else None,group)
DT=int(os.environ.get("DT","0"))
import importlib
def patch(m):
    m.processors=lambda d,**k:132
    return m
if __name__=="__main__":
    what=sys.argv[1]; types=sys.argv[2].split(","); rows=[int(r) for r in sys.argv[3].split(",")]
    dt=(torch.bfloat16,torch.float16)[DT]
    F=int(os.environ.get("F","256"))
    for ty in types:
        m=fake(ty,F,4096) if what!="int4" else fake4(F,4096,int(ty.rstrip("z")),ty.endswith("z"))
        for r in rows:
            x=torch.zeros(r,4096,dtype=dt); out=torch.zeros(r,F,dtype=dt)
            print(what,ty,r,dt)
            try:
                if what=="few": few.few_rows(x,m,None,out,True)
                elif what=="many":
                    import quire.kernels.triton.gguf.many as many
                    many.many_rows(x,m,None,out,True)
                elif what=="int4":
                    import quire.kernels.triton.int4.hopper_many as h
                    try: import quire.kernels.triton.hopper_products.many as hh; patch(hh)
                    except ImportError: patch(h)
                    h.many_rows(x,m,None)
                elif what=="hopper":
                    import quire.kernels.triton.hopper_products.many as hh; patch(hh)
                    import quire.kernels.triton.gguf.hopper_many as h
                    h.many_rows(x,m,None,out)
            except Exception as e:
                import traceback; traceback.print_exc(limit=-int(os.environ.get("TB","3")))
