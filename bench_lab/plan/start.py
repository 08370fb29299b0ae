"""Starts of two trees in turns, in processes of their own: total from the process's start, phases, kernels looked up."""
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
b = time.time()
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=4096, num_blocks=20000, **json.loads(sys.argv[2]))
c = time.time()
import resource as _r; _u = _r.getrusage(_r.RUSAGE_SELF)
print("ARM", json.dumps(dict(cpu=_u.ru_utime + _u.ru_stime, begin=a - t0, imports=b - a, llm=c - b, total=c - t0, kernels=[(n, round(d, 3)) for n, d, _ in found])), flush=True)
os._exit(0)
'''
trees = {"old": os.environ["HOME"] + "/old/src", "new": os.environ.get("NEW", os.getcwd() + "/src")}
model, extra, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
def start(name):
    env = {**os.environ, "PYTHONPATH": trees[name], "T0": str(time.time())}
    p = subprocess.run([sys.executable, "-c", ARM, model, extra], env=env, capture_output=True, text=True)
    line = next((l for l in p.stdout.splitlines() if l.startswith("ARM")), None)
    if line is None: print(p.stdout[-1500:], p.stderr[-2500:]); raise SystemExit("no ARM")
    r = json.loads(line[4:]); m = re.search(r"ready in .*", p.stderr + p.stdout); r["says"] = m[0] if m else ""
    return r
for n in trees:
    r = start(n); print(n, "first", round(r["total"], 2), len(r["kernels"]), r["says"], flush=True)
got = defaultdict(list)
for i in range(rounds):
    for n in (("old", "new") if i % 2 == 0 else ("new", "old")):
        r = start(n); got[n].append(r); print(n, *(f"{k} {r[k]:.2f}" for k in ("begin", "imports", "llm", "total", "cpu")), len(r["kernels"]), r["says"], flush=True)
print("median", {n: {k: round(statistics.median(r[k] for r in v), 3) for k in ("begin", "imports", "llm", "total", "cpu")} for n, v in got.items()}, "least", {n: {k: round(min(r[k] for r in v), 3) for k in ("imports", "llm", "total", "cpu")} for n, v in got.items()}, "ratio of totals", round(statistics.median(b["total"] / a["total"] for a, b in zip(got["old"], got["new"])), 3))
for n, v in list(got.items())[:0]:
    c = defaultdict(lambda: [0, 0.0])
    for k, d in v[-1]["kernels"]: c[k][0] += 1; c[k][1] += d
    print(n, len(v[-1]["kernels"]), "looked up,", round(sum(d for _, d in v[-1]["kernels"]), 2), "s:", "; ".join(f"{k} {a}x {1e3*b:.0f}ms" for k, (a, b) in sorted(c.items(), key=lambda x: -x[1][1])[:60]))
