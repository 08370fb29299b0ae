"""Steps of nano by kind, and kernels of prompts and decodes: ns.py MODEL [key=value ...]."""
import os, sys, time, random
from collections import defaultdict
import torch
from quire.bench.engine.session import open_session
from quire.bench.engine.workloads import workload
from quire.bench.engine.timing import generate_seconds
from quire import SamplingParams
import quire.engine.recovery as rec
t0 = time.perf_counter()
model = sys.argv[1]; more = dict(a.split("=") for a in sys.argv[2:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more))
session = ctx.__enter__(); llm = session.llm
print(f"== {' '.join(sys.argv[1:])}: open after {time.perf_counter()-t0:.1f} s", flush=True)
log = []; host = [0.0, 0.0]
launch, finish = rec.Recovery.launch, rec.Recovery.finish
def timed_launch(self, schedule, before):
    t = time.perf_counter(); out = launch(self, schedule, before); host[0] += time.perf_counter() - t; return out
def timed_finish(self, step):
    t = time.perf_counter(); out = finish(self, step); now = time.perf_counter(); host[1] += now - t
    chunks = step.schedule.chunks
    log.append((now, now - t, len(chunks), sum(c.count if hasattr(c, "count") else c.num_tokens for c in chunks)))
    return out
rec.Recovery.launch, rec.Recovery.finish = timed_launch, timed_finish
whole = workload("nano")
def run(load, show=True):
    llm.reset_prefix_cache(); log.clear(); host[:] = [0.0, 0.0]
    a = time.perf_counter(); s = generate_seconds(llm, load.prompts, load.params)
    last = a; kinds = defaultdict(lambda: [0, 0.0, 0, 0, 0.0])
    for now, waited, seqs, tokens in log:
        rows = (seqs + 31) // 32 * 32 if tokens == seqs else -((tokens + 1023) // 1024 * 1024)
        k = kinds[rows]; k[0] += 1; k[1] += now - last; k[2] += tokens; k[3] += seqs; k[4] += waited; last = now
    if not show: return
    print(f"{load.output_tokens / s:,.0f} tok/s, {s:.2f} s, {len(log)} steps, host in launch {host[0]:.2f}, waiting {host[1]:.2f}", flush=True)
    for r, (n, t, tok, seqs, waited) in sorted(kinds.items()):
        print(f"   {'decodes up to' if r > 0 else 'tokens up to'} {abs(r):5d}: {n:5d} steps {t:6.2f} s, {1e3*t/n:7.2f} ms each, {tok/n:7.1f} tokens, {seqs/n:6.1f} sequences, waited {1e3*waited/n:6.2f}", flush=True)
run(whole.warm_up(), False); run(whole)
def kernels(what, batch, context, out, top=12):
    def go():
        r = random.Random(time.time()); prompts = [[r.randrange(1000, 20000) for _ in range(context)] for _ in range(batch)]
        t = time.perf_counter(); llm.generate(prompts, SamplingParams(max_tokens=out, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
    go(); s = go()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go()
    times = defaultdict(lambda: [0, 0.0])
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            k = times[e.name[:70]]; k[0] += 1; k[1] += e.device_time if hasattr(e, "device_time") else e.cuda_time
    total = sum(v[1] for v in times.values())
    print(f"-- {what}: {batch} of {context}, {out} out: {s*1e3:.1f} ms, kernels {total/1e3:.1f} ms")
    for name, (n, t) in sorted(times.items(), key=lambda i: -i[1][1])[:top]:
        print(f"{t/total*100:5.1f} % {n:6d} × {t/n:8.1f} µs = {t/1e3:8.2f} ms  {name}", flush=True)
kernels("prompts", 32, 512, 1)
kernels("decodes", 128, 16, 65)
os._exit(0)
