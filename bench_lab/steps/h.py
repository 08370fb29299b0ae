import sys, time
sys.argv = ["x", "Q4_K", "0"]
src = open("gguf_gpu_bench.py").read().split("t0 = time.time()")[0]
exec(src)
from quire.kernels.triton.gguf import few, few_digits as fd
from quire.kernels.triton.gguf.few_digits import Shape
variants = {"few": None, "digits": "default", "w4a4": Shape(4, 4), "w4a2": Shape(4, 2)}
def call(v, x, m, out):
    if v is None: few.few_rows(x, m, None, out, True)
    elif v == "default": fd.few_rows(x, m, None, out, True)
    else: fd.few_rows(x, m, None, out, True, v)
TY = ["Q4_K", "Q8_0", "Q4_0"]
has = lambda t, v, r: (v in ("few", "digits") and r == 1) or (t == "Q4_K" and (r == 1 or v == "digits"))
jobs = [(t, s, v, r) for t in TY for s in SHAPES for v in variants for r in (1, 2) if has(t, v, r)]
def warm(job):
    t, s, v, r = job
    m = to_tiles(t, stored(t, 256, s[1])); x = torch.randn(r, s[1], device=dev, dtype=bf)
    call(variants[v], x, m, x.new_empty(r, 256))
t0 = time.time()
def ready(pool_job): pool_job.result()
pool = ThreadPoolExecutor(14)
waiting = {job: pool.submit(warm, job) for job in jobs}
for t in TY:
    for job in jobs:
        if job[0] == t: waiting[job].result()
    print(f"compiled {t} {time.time()-t0:.0f} s", flush=True)
for t in TY:
    for s in SHAPES:
        first = to_tiles(t, stored(t, *s)); size = first.kind.num_bytes(*s); copies = max(2, min(24, int(250e6 / size) + 1))
        ms = [first] + [first._replace(**{n: getattr(first, n).clone() for n in ("codes", "upper", "scale", "wide")}) for _ in range(copies - 1)]
        numbers = dequantise(first, torch.float32)
        line = []
        for r in (1, 2):
            x = torch.randn(r, s[1], device=dev, dtype=bf); out = x.new_empty(r, s[0]); want = (x.double() @ numbers.double().T)
            for name, v in variants.items():
                if not has(t, name, r): continue
                call(v, x, first, out); err = ((out.double() - want).abs().max() / want.abs().max()).item()
                us = timed(lambda i: call(v, x, ms[i], out), copies)
                line.append(f"{name}{'' if r == 1 else ' r2'} {us:.1f} ({size/us*1e6/PEAK:.0%}){'' if err < 6e-3 else ' ERR %.1e' % err}")
        print(t, s, f"{size/1e6:.1f} MB:", "; ".join(line), flush=True)
