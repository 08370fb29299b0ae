"""nb2.py TOKENS:BLOCK variants: isolated and sustained, with clocks and power."""
import sys, subprocess, threading, time, datetime; argv = sys.argv; sys.argv = [argv[0], "1:64", "base"]
exec(open(__file__.replace("nb2.py", "nb.py")).read().split("act = ClampedSwiGLU")[0])
act = ClampedSwiGLU(1.702, 7.0)
log = []
def watch():
    p = subprocess.Popen("nvidia-smi --query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active --format=csv,noheader,nounits -lms 20", shell=True, stdout=subprocess.PIPE, text=True)
    for line in p.stdout: log.append((time.time(), line.strip()))
threading.Thread(target=watch, daemon=True).start(); time.sleep(0.5)
tokens, block = map(int, argv[1].split(":"))
X = torch.randn(tokens, H, device="cuda", generator=g).bfloat16()
zero = [tuple(FourBitExperts(torch.zeros_like(a.codes), a.words) for a in l) for l in layers[:1]] * L
graphs = {}
chs = [torch.randn(tokens, E, device="cuda", generator=g).topk(K).indices for _ in range(L)]
prep = [sort_by_expert(c, E, block) for c in chs]
keep = []
for name in argv[2].split(","):
    v, _, what = name.partition("/")
    m = importlib.import_module("n_" + v); x = X * 0 if "x" in what else X
    def call():
        for (gu, dn), bl in zip(zero if "c" in what else layers, prep):
            t = by_expert(x, bl, K); h = m.product(t, gu, bl, act, bias[0])
            if "x" in what: h = h * 0
            keep.append((t, h, m.product(h, dn, bl, None, bias[1])))
    try: call(); torch.cuda.synchronize()
    except Exception as e: print(name, "FAILED", repr(e)[:200]); continue
    gr = torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr): call()
    graphs[name] = gr
def timed(gr, n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); [gr.replay() for _ in range(n)]; b.record(); b.synchronize(); return a.elapsed_time(b) / n / L * 1e3
for rnd in range(2):
    for name, gr in graphs.items():
        gr.replay(); torch.cuda.synchronize(); iso = []
        for _ in range(12): time.sleep(0.02); iso.append(timed(gr, 1))
        t0 = time.time(); sus = timed(gr, 700); t1 = time.time()
        sel = [l for s, l in log if t0 + 0.25 * (t1 - t0) < s < t1]
        f = [l.split(", ") for l in sel]
        print(f"{name:10s} isolated {sorted(iso)[6]:7.1f} sustained {sus:7.1f} us;  clock {sorted(int(z[0]) for z in f)[len(f)//2] if f else 0} MHz power {sum(float(z[1]) for z in f)/max(1,len(f)):.0f} W reasons {set(z[2] for z in f)} n {len(f)}", flush=True)
os._exit(0)
