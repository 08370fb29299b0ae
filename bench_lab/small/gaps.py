"""How idle the GPU is while nano's prompts are computed, and why: gaps.py MODEL [key=value ...]."""
import os, sys, time, random
from collections import defaultdict
import torch
from quire.bench.engine.session import open_session
from quire.bench.engine.workloads import workload, answers
from quire.bench.engine.timing import generate_seconds
import quire.engine.recovery as rec, quire.runner.runner as rr, quire.engine.engine as ee
model = sys.argv[1]; more = dict(a.split("=") for a in sys.argv[2:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more)); session = ctx.__enter__(); llm = session.llm
whole = workload("nano")
spans = []
def timed(cls, name):
    f = getattr(cls, name)
    def g(*a, **k):
        t = time.perf_counter(); out = f(*a, **k); spans.append((name, t, time.perf_counter())); return out
    setattr(cls, name, g)
def timed_fn(mod, name):
    f = getattr(mod, name)
    def g(*a, **k):
        t = time.perf_counter(); out = f(*a, **k); spans.append((name, t, time.perf_counter())); return out
    setattr(mod, name, g)
timed(rec.Recovery, "launch"); timed(rec.Recovery, "finish"); timed(rr.ModelRunner, "_forward"); timed(rr.ModelRunner, "_logits"); timed(rr.ModelRunner, "_draw"); timed(rr.ModelRunner, "run_layers"); timed_fn(rr, "step_inputs"); timed(type(llm.engine.scheduler), "plan"); timed_fn(rec, "step_plan")
prompts = whole.prompts
def go(out):
    llm.reset_prefix_cache(); spans.clear()
    return generate_seconds(llm, prompts, answers([out] * len(prompts), 0.6))
w = whole.warm_up(); generate_seconds(llm, w.prompts, w.params)
for i in range(3):
    t = time.perf_counter(); s = go(12); print(f"run {i}: {s*1e3:.0f} ms", flush=True)
for name, a, b in spans[:64]:
    print(f"   {name:12s} at {(a-spans[0][1])*1e3:8.1f} for {(b-a)*1e3:7.1f}")
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: s = go(12)
ev = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
end = ev[0][1]; idle = 0; gaps = []
for a, b, n in ev[1:]:
    if a > end: idle += a - end; gaps.append((a - end, a - ev[0][0], n)); 
    end = max(end, b)
print(f"profiled {s*1e3:.0f} ms, span {(end-ev[0][0])/1e3:.1f} ms, idle {idle/1e3:.1f} ms; largest gaps (µs, at ms, before):")
for g, at, n in sorted(gaps, reverse=True)[:14]: print(f"   {g:9.0f} {at/1e3:9.1f} {n[:60]}")
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as p: s = go(12)
k = defaultdict(lambda: [0, 0.0, 0.0])
for e in p.events():
    if e.name.startswith("cu") and e.device_type == torch.autograd.DeviceType.CPU:
        d = e.time_range.end - e.time_range.start; x = k[e.name]; x[0] += 1; x[1] += d; x[2] = max(x[2], d)
for n, (c, t, m) in sorted(k.items(), key=lambda i: -i[1][1])[:12]: print(f"   {n:40s} {c:6d} {t/1e3:9.1f} ms, most {m/1e3:8.2f}")
os._exit(0)
