"""Kernels of a decode step: prof.py MODEL BATCH CONTEXT [key=value ...]."""
import os, sys, time, random
from collections import defaultdict
import torch
from quire.bench.engine.session import open_session
from quire import SamplingParams
model, batch, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
more = dict(a.split("=") for a in sys.argv[4:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more))
llm = ctx.__enter__().llm
r = random.Random(0)
def run(out, n=batch):
    r = random.Random(0); prompts = [[r.randrange(1000, 20000) for _ in range(context)] for _ in range(n)]
    t = time.perf_counter(); llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True, temperature=0.0)); return time.perf_counter() - t
run(8); a = run(8); b = run(72); print(f"{model} {batch} of {context}: step {(b-a)/64*1e3:.2f} ms", flush=True)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
    run(40)
times = defaultdict(lambda: [0, 0.0])
for e in p.events():
    if e.device_type == torch.autograd.DeviceType.CUDA:
        k = times[e.name[:90]]; k[0] += 1; k[1] += e.device_time if hasattr(e, "device_time") else e.cuda_time
total = sum(v[1] for v in times.values())
for name, (n, t) in sorted(times.items(), key=lambda i: -i[1][1])[:24]:
    print(f"{t/total*100:5.1f} % {n:6d} × {t/n:8.1f} µs = {t/1e3:8.2f} ms  {name}")
os._exit(0)
