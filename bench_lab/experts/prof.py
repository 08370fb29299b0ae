"""prof.py MODEL batch context [k=v]: kernels of decode steps."""
import os, sys, time, random, torch, collections
from quire.bench.engine.session import open_session
from quire import SamplingParams
model, batch, ctxlen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]); more = dict(a.split("=") for a in sys.argv[4:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more)); session = ctx.__enter__(); llm = session.llm
r = random.Random(1)
prompts = [[r.randrange(1000, 20000) for _ in range(ctxlen)] for _ in range(batch)]
def go(n):
    llm.reset_prefix_cache(); t = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
go(8); a = min(go(1) for _ in range(2)); print(model, more, batch, ctxlen, "ms a step", [round((go(64) - a) / 63 * 1e3, 3) for _ in range(3)], flush=True)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go(12)
ev = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
picks = [i for i, e in enumerate(ev) if "_pick" in e[2] or "_draw" in e[2]]
steps = [ev[a + 1 : b + 1] for a, b in zip(picks[-7:], picks[-6:])]
n = min(len(s) for s in steps); steps = [s for s in steps if len(s) == n]
adv, dur, cnt = collections.Counter(), collections.Counter(), collections.Counter()
for s in steps:
    for i in range(1, n):
        adv[s[i][2][:90]] += (s[i][1] - s[i-1][1]) / len(steps); dur[s[i][2][:90]] += (s[i][1]-s[i][0]) / len(steps); cnt[s[i][2][:90]] += 1 / len(steps)
print("kernels a step", n, "steps", len(steps), "total us", round(sum(adv.values()), 1))
for k, v in adv.most_common(28): print(f"  {cnt[k]:6.1f} x  advance {v:8.1f}  dur {dur[k]:8.1f}  {k}")
s = steps[0]; i0 = n // 2
for i in range(i0, i0 + int(os.environ.get("SEQ", "0"))): print(f"   +{s[i][1]-s[i-1][1]:6.2f} dur {s[i][1]-s[i][0]:6.2f} {s[i][2][:80]}")
os._exit(0)
