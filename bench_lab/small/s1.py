"""ms of a decode step: s1.py MODEL batches [key=value ...]"""
import os, sys, time, random
from quire.bench.engine.session import open_session
from quire import SamplingParams
model, batches = sys.argv[1], [int(b) for b in sys.argv[2].split(",")]; more = dict(a.split("=") for a in sys.argv[3:])
t0 = time.perf_counter()
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more))
session = ctx.__enter__(); llm = session.llm
r = random.Random(1)
out = f"{model} {more} {[k + '=' + v for k, v in os.environ.items() if k.startswith('QUIRE_PF')]} open {time.perf_counter()-t0:.0f} s:"
for batch in batches:
    context = 500
    prompts = [[r.randrange(1000, 20000) for _ in range(context)] for _ in range(batch)]
    def go(n):
        llm.reset_prefix_cache()
        t = time.perf_counter(); llm.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
    n = 129 if batch > 8 else 257
    go(8); a = sorted(go(1) for _ in range(3))[1]; s = sorted(go(n) for _ in range(3))
    out += f"  {batch}: " + "/".join(f"{(x-a)/(n-1)*1e3:.3f}" for x in s)
print(out, flush=True)
os._exit(0)
