import time, torch, sys, statistics, threading
from quire.kv import Namespace, open_store, LayerPool
N=1024
layers=[tuple(torch.zeros(2,2*N+8,16,8,128,dtype=torch.bfloat16,device="cuda").unbind(0)) for _ in range(36)]
pool=LayerPool(layers)
st=open_store(pool,Namespace("m","","",16,"l","r"),host_cache_bytes="3GiB")
toks=list(range(16*N))
p=st.put(toks,list(range(N))); p.wait(30); time.sleep(3)
import numpy as np
def one(poll):
    t=time.perf_counter(); m=st.match(toks); t1=time.perf_counter(); l=m.load(list(range(N,2*N))); t2=time.perf_counter()
    if poll:
        while not l.done(): time.sleep(0.001)
    else: l.wait(10)
    t3=time.perf_counter(); return (t1-t)*1e3,(t2-t1)*1e3,(t3-t2)*1e3
for poll in (0,1):
    r=[one(poll) for _ in range(12)]
    print("poll" if poll else "wait", [f"{statistics.median(c):.2f}" for c in zip(*r)], "GB/s", N*36*2*16*8*128*2/statistics.median([x[2] for x in r])/1e6, flush=True)
# raw: one large pinned copy
h=torch.empty(N*36*2*16*8*128*2,dtype=torch.uint8,pin_memory=True); d=torch.empty_like(h,device="cuda")
ts=[]
for _ in range(6):
    torch.cuda.synchronize(); t=time.perf_counter(); d.copy_(h,non_blocking=True); torch.cuda.synchronize(); ts.append(time.perf_counter()-t)
print("raw ms", statistics.median(ts)*1e3)
import cProfile,pstats
st._loader._copies  # noqa
from quire.kv.pools.staging import Staging
spent=[]
mv=Staging.move
def timed(self,*a,**k):
    t=time.perf_counter(); r=mv(self,*a,**k); spent.append(time.perf_counter()-t); return r
Staging.move=timed
one(0); print("move calls", len(spent), "each ms", [f"{s*1e3:.2f}" for s in spent])
st.close()
