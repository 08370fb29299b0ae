"""Kernels of decodes at 256 and at one stream: p2.py MODEL [key=value ...]."""
import os, sys, time, random
from collections import defaultdict
import torch
from quire.bench.engine.session import open_session
from quire import SamplingParams
t0 = time.perf_counter()
model = sys.argv[1]; more = dict(a.split("=") for a in sys.argv[2:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more))
session = ctx.__enter__(); llm = session.llm
print(f"== {' '.join(sys.argv[1:])}: open after {time.perf_counter()-t0:.1f} s", flush=True)
def kernels(batch, context, out, top=24):
    def go(n):
        llm.reset_prefix_cache()
        r = random.Random(1); prompts = [[r.randrange(1000, 20000) for _ in range(context)] for _ in range(batch)]
        t = time.perf_counter(); llm.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
    go(out); a = min(go(1) for _ in range(2)); s = min(go(out) for _ in range(2)); 
    def prof(n):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go(n)
        times = defaultdict(lambda: [0, 0.0])
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                k = times[e.name[:90]]; k[0] += 1; k[1] += e.device_time if hasattr(e, "device_time") else e.cuda_time
        return times
    one, many = prof(1), prof(out); n = out - 1
    left = {k: ((v[0] - one.get(k, [0, 0])[0]) / n, (v[1] - one.get(k, [0, 0.0])[1]) / n) for k, v in many.items()}
    total = sum(v[1] for v in left.values())
    print(f"-- decodes {batch} of {context}: {(s-a)/n*1e3:.3f} ms a step, kernels {total/1e3:.3f} ms")
    for name, (c, t) in sorted(left.items(), key=lambda i: -i[1][1])[:top]:
        if t > 3: print(f"{t/total*100:5.1f} % {c:6.1f} × {t/max(c,.01):8.2f} µs = {t/1e3:8.3f} ms  {name}", flush=True)
kernels(256, 300, 65)
kernels(1, 300, 65, 14)
os._exit(0)
