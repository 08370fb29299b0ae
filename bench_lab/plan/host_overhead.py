import os, sys, time
os.environ["TRITON_CACHE_DIR"] = "triton-cache"
import torch, triton
exec(open(__file__.replace("host_overhead", "compile_for_hopper")).read().split("print(\"triton\"")[0].split("import torch, triton\n",1)[1].replace('print("   ", *found[-1], flush=True)','pass'))
import quire.runner.warmup as wu
from quire.kernels.triton.backend import TritonBackend
from quire.models.source import open_model, empty_model
from quire.kv.layout import KVLayout
from quire.models.pool_groups import pool_groups
from quire.layers.tp import SINGLE
from quire.layers.attention import Step
import dataclasses
cpu, bf = torch.device("cpu"), torch.bfloat16
src = open_model("qwen3-0.6b", load_format="dummy", progress=False)
cfg = dataclasses.replace(src.config, vocab_size=512)
model = empty_model(cfg, bf, cpu); model.freeze(); model.reserve(8192, cpu)
layout = KVLayout(pool_groups(cfg, SINGLE, window_groups=True), 16, bf, bf)
from quire.kv.pool import PagedKVCache
from quire.runner.graphs import StepGraphs
import quire.kernels.triton.gemv as gv
n = int(sys.argv[1]) if len(sys.argv) > 1 else 64
import torch.nn.functional as F
real_linear = F.linear
def quick_linear(x, w, b=None): return x.new_empty(*x.shape[:-1], w.shape[0])
F.linear = quick_linear
torch.nn.functional.linear = quick_linear
cache = PagedKVCache(layout, 4, cpu, TritonBackend())
def nolaunch(self, *a, grid=None, warmup=False, **k):
    return run(self, *a, grid=grid, warmup=True, **k)
JITFunction.run = nolaunch
graphs = StepGraphs(model, cache, n, n, 512)
shape = next(s for s in graphs.shapes if s.tokens == n and s.is_decode)
with torch.inference_mode():
    for _ in range(2): graphs.forward(shape)
    t = time.process_time()
    for _ in range(5): graphs.forward(shape)
    dt = (time.process_time() - t) / 5
    print(f"{n} rows: {1e3*dt:.1f} ms a pass, {1e6*dt/28:.0f} us a layer")
    import cProfile, pstats
    p = cProfile.Profile(); p.enable()
    for _ in range(5): graphs.forward(shape)
    p.disable(); pstats.Stats(p).sort_stats("tottime").print_stats(35)
