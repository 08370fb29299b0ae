import os, sys, time, random, torch
from quire.bench.engine.session import open_session
from quire import SamplingParams
from quire.runner.graphs import GraphShape
import quire.kernels.triton.attention.combine as C, quire.kernels.triton.attention.decode as D
model = sys.argv[1]; length = int(sys.argv[2]); more = dict(a.split("=") for a in sys.argv[3:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=max(4096, length + 600), **more)); session = ctx.__enter__(); llm = session.llm
graphs = llm.engine.runner.graphs
r = random.Random(1)
S = D.Shape
base = S(64, 4, 3, 2)
V = {"base": (64, 2, base), "32/2": (32, 2, base), "16/2": (16, 2, base), "16/1": (16, 1, base), "32/1": (32, 1, base), "16/4": (16, 4, base), "64/4": (64, 4, base), "8/1": (8, 1, base),
     "st1": (64, 2, S(64, 4, 1, 2)), "st2": (64, 2, S(64, 4, 2, 2)), "w8": (64, 2, S(64, 8, 3, 2)), "w2": (64, 2, S(64, 2, 3, 2)), "p1": (64, 2, S(64, 4, 3, 1)), "p3": (64, 2, S(64, 4, 3, 3)), "base again": (64, 2, base)}
def go(n, p):
    llm.reset_prefix_cache(); t = time.perf_counter()
    llm.generate([p], SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
prompt = [r.randrange(1000, 20000) for _ in range(length)]
for name, (once, warps, shape) in V.items():
    C._AT_ONCE, C._WARPS = once, warps; D._SHAPES[True] = shape
    graphs.record([GraphShape(1, 1)])
    go(8, prompt); a = min(go(1, prompt) for _ in range(2)); ms = min(go(128, prompt) - a for _ in range(2)) / 127 * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go(24, prompt)
    ev = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    adv = {}
    first = [i for i, e in enumerate(ev) if "_pick" in e[2]][2]
    for x, y, z in zip(ev[first:], ev[first + 1:], ev[first + 2:]):
        n = y[2].split("(")[0][:18]
        if n == "_few_rows" or n == "_gemv": n += " after " + x[2][:16]
        adv.setdefault(n, []).append(y[1] - x[1])
    print(model, more, length, name, "ms %.4f" % ms, {n: (round(sum(v) / len(v), 2)) for n, v in adv.items() if len(v) > 300}, flush=True)
os._exit(0)
