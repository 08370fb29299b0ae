"""Variants: starts of two trees in turns, in processes of their own: total from the process's start, phases, kernels looked up."""
import json, os, re, statistics, subprocess, sys, time
from collections import defaultdict
ARM = r'''
import sys, time, json, os
t0 = float(os.environ["T0"]); a = time.time()
import triton.compiler as tc
found = []
orig = tc.compile
def timed(src, *x, **k):
    b = time.time(); out = orig(src, *x, **k); found.append((getattr(src, "name", "?"), time.time() - b, b)); return out
tc.compile = timed
import triton.compiler.compiler as tcc; tcc.compile = timed
from quire import LLM
V = json.loads(os.environ.get("V", "{}"))
exec(os.environ.get("PATCH", ""))
b = time.time()
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=4096, num_blocks=20000, **json.loads(sys.argv[2]))
c = time.time()
print("ARM", json.dumps(dict(begin=a - t0, imports=b - a, llm=c - b, total=c - t0, kernels=[(n, round(d, 3)) for n, d, _ in found])), flush=True)
os._exit(0)
'''

PATCH = """
import copy
import quire.ranks.rank_model as rm, quire.runner.warmup as wu
from concurrent.futures import ThreadPoolExecutor
import torch
import time as _t
def patched(model, layout, device, max_tokens, link, adapters=None):
    model.reserve(2 * wu.LONG, device)
    steps = wu._steps(max_tokens)
    if V.get("fewer"): steps = [s for s in steps if s[0] not in ([256], [128], [1] * 9, [1] * 150)]
    if V.get("thin"):
        whole, model = model, copy.copy(model); model._modules = dict(whole._modules)
        dec = copy.copy(whole.model); dec._modules = dict(whole.model._modules)
        dec._modules["layers"] = torch.nn.ModuleList([whole.model.layers[0]]); dec._rope_of_layer = whole.model._rope_of_layer[:1]
        model._modules["model"] = dec
    times = []
    def run(step):
        a = _t.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for launched in wu._launch(model, layout, device, link, *step): launched.result()
        times.append(round(_t.perf_counter() - a, 3))
    with ThreadPoolExecutor(V.get("threads") or len(steps)) as threads:
        for ran in [threads.submit(run, step) for step in steps]: ran.result()
    print("TIMES", times, flush=True)
if V.get("patch"): rm.warm_up = patched
if V.get("scratchless"): pass
"""
variants = {"old": (os.environ["HOME"] + "/old/src", {}), "new": (os.getcwd() + "/src", {}),
 "patched": (os.getcwd() + "/src", dict(patch=1)), "fewer": (os.getcwd() + "/src", dict(patch=1, fewer=1)),
 "one thread": (os.getcwd() + "/src", dict(patch=1, threads=1)), "three threads": (os.getcwd() + "/src", dict(patch=1, threads=3)),
 "thin": (os.getcwd() + "/src", dict(patch=1, thin=1)), "thin, one thread": (os.getcwd() + "/src", dict(patch=1, thin=1, threads=1)),
 "thin, fewer, three": (os.getcwd() + "/src", dict(patch=1, thin=1, fewer=1, threads=3))}
got = defaultdict(list)
rounds = int(sys.argv[1])
for i in range(rounds + 1):
    for n, (path, v) in list(variants.items())[:2 if i == 0 else None]:
        env = {**os.environ, "PYTHONPATH": path, "T0": str(time.time()), "V": json.dumps(v), "PATCH": PATCH if v else ""}
        p = subprocess.run([sys.executable, "-c", ARM, "qwen3-0.6b", "{}"], env=env, capture_output=True, text=True)
        line = next((l for l in p.stdout.splitlines() if l.startswith("ARM")), None)
        if line is None: print(n, p.stdout[-500:], p.stderr[-1500:]); continue
        r = json.loads(line[4:]); m = re.search(r"kernels ([\d.]+) s.*graphs ([\d.]+)", p.stderr + p.stdout)
        r["kernels"], r["graphs"] = float(m[1]), float(m[2]); r["times"] = next((l for l in p.stdout.splitlines() if l.startswith("TIMES")), "")
        if i: got[n].append(r)
for n, v in got.items():
    print(f"{n:20s}", *(f"{k} {statistics.median(r[k] for r in v):.2f} ({min(r[k] for r in v):.2f})" for k in ("imports", "llm", "kernels", "graphs", "total")), v[-1]["times"])
