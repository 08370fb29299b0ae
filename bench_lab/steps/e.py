"""e.py MODEL batches [k=v]: ms a step; env: profile."""
import os, sys, time, random, torch
from quire.bench.engine.session import open_session
from quire import SamplingParams
model, batches = sys.argv[1], [int(b) for b in sys.argv[2].split(",")]; more = dict(a.split("=") for a in sys.argv[3:])
t0 = time.perf_counter()
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more)); session = ctx.__enter__(); llm = session.llm
print(os.environ.get("TAG"), model, more, "open %.2f s" % (time.perf_counter() - t0), flush=True)
if "OPEN" in os.environ: os._exit(0)
r = random.Random(1)
for batch in batches:
    prompts = [[r.randrange(1000, 20000) for _ in range(512)] for _ in range(batch)]
    def go(n):
        llm.reset_prefix_cache(); t = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
    go(8); found = []
    for _ in range(5):
        a = min(go(1) for _ in range(2)); found.append((go(256) - a) / 255 * 1e3)
    print(os.environ.get("TAG"), model, more, batch, [round(x, 4) for x in sorted(found)], flush=True)
if "profile" in os.environ:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go(12) if batch > 1 else go(40)
    ev = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    at = [i for i, e in enumerate(ev) if "_pick" in e[2]][-10]
    end = None
    for s, e, n in ev[at - 6 : at + 10]:
        print(f"  gap {0 if end is None else s-end:6.2f} dur {e-s:7.2f} {n[:60]}"); end = e
    # a layer's timeline: mean advance of the end by kernel in the step
    picks = [i for i, e in enumerate(ev) if "_pick" in e[2]]
    steps = [ev[a + 1 : b + 1] for a, b in zip(picks[-20:], picks[-19:])]
    n = min(len(s) for s in steps); steps = [s for s in steps if len(s) == n]
    adv = [sum(s[i][1] - s[i - 1][1] for s in steps) / len(steps) for i in range(1, n)]
    names = [e[2][:40] for e in steps[0]]
    print("kernels a step", n, "steps", len(steps), "total", sum(adv))
    per = (n - 30) // 2
    i0 = n // 2
    for i in range(i0, i0 + 24): print(f"   +{adv[i-1]:6.2f} dur {steps[0][i][1]-steps[0][i][0]:6.2f} {names[i]}")
os._exit(0)
