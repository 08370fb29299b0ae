"""Kernels of a prompt of 8,192 tokens in the engine, with and without an adapter: sums by name."""
import re, statistics, sys, tempfile, time
from collections import defaultdict
from pathlib import Path
import torch
from quire import SamplingParams
from quire.bench.engine.dummy_adapters import write_adapters
from quire.bench.engine.workloads import random_prompt
from quire.bench.engine.session import open_session
ctx = open_session(dict(model="qwen3-8b", load_format="dummy", max_model_len=8193, enable_lora=True, max_loras=8, max_lora_rank=16, max_cpu_loras=8))
session = ctx.__enter__(); llm = session.llm; cfg = session.source.config
folder = Path(tempfile.mkdtemp())
adapters = list(write_adapters(folder, cfg, 2, 16, torch.bfloat16))
params = [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)]
def once(seed, a):
    llm.reset_prefix_cache(); torch.cuda.synchronize(); t = time.perf_counter()
    llm.generate([random_prompt(8192, seed)], params, use_tqdm=False, lora_request=a and [a])
    return time.perf_counter() - t
for s in range(3): once(s, None), once(s, adapters[0])
w = defaultdict(list)
for s in range(24):
    for a in (None, adapters[0]): w[bool(a)].append(once(100 + s, a))
print("ms", flush=True); print("ms", {k: round(1e3 * statistics.median(v), 2) for k, v in w.items()}, "ratio", [round(q, 4) for q in statistics.quantiles(p / q for p, q in zip(w[False], w[True]))], statistics.median(p / q for p, q in zip(w[False], w[True])), flush=True)
if sys.argv[1:] != ['prof']: import os; os._exit(0)
from torch.profiler import ProfilerActivity, profile
sums = {}
for rep in range(2):
  for a in (None, adapters[0]):
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for s in range(3): once(200 + s + 10 * rep, a)
    d = defaultdict(lambda: [0, 0.0]); spans = []
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            d[re.sub(r"<.*|\(.*", "", e.name)[:70]][0] += 1; d[re.sub(r"<.*|\(.*", "", e.name)[:70]][1] += e.time_range.elapsed_us()
            spans.append((e.time_range.start, e.time_range.end))
    spans.sort(); busy = 0; end = 0
    for b, f in spans:
        if f > end: busy += f - max(b, end); end = f
    print("adapter" if a else "none", "busy ms a prompt", round(busy / 3e3, 2), "sum", round(sum(v[1] for v in d.values()) / 3e3, 2))
    for k, (n, t) in sorted(d.items(), key=lambda x: -x[1][1])[:14 if rep else 0]: print(f"  {t/3/36:9.1f} us/layer {n/3/36:6.2f} x {k}")
llm.close()
