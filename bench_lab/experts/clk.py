"""clk.py TOKENS:BLOCK,.. variants: where the time of a stage goes."""
import sys; argv = sys.argv; sys.argv = [argv[0], "1:64", "base"]
src = open(__file__.replace("clk.py", "nb.py")).read().split("act = ClampedSwiGLU")[0].replace("if any('lin' in v for v in names)", "if True")
exec(src)
act = ClampedSwiGLU(1.702, 7.0)
out = open(os.environ["OUT"] + "/clk.txt", "w")
for case in argv[1].split(","):
    tokens, block = map(int, case.split(":"))
    x = torch.randn(tokens, H, device="cuda", generator=g).bfloat16()
    ch = torch.randn(tokens, E, device="cuda", generator=g).topk(K).indices
    bl = sort_by_expert(ch, E, block); t = by_expert(x, bl, K)
    for v in argv[2].split(","):
        m = importlib.import_module("n_" + v); m.DBG = torch.zeros(20 * 256, dtype=torch.int32, device="cuda")
        for l in range(L):
            w = (lins if "lin" in v else layers)[l][0]
            m.DBG.zero_(); h = m.product(t, w, bl, act, bias[0]); torch.cuda.synchronize()
        d = m.DBG.view(20, 256).cpu().long(); n = int((d[0] != 0).sum()); print("nonzero", (d != 0).sum(1).tolist()); d = d[:, :n]; d -= d[0, 0].clone()
        print(f"== {v} {tokens}:{block} steps {n} total {int(d[:, n-1].max())} cycles", flush=True)
        r = lambda z: f"{z.float().mean():7.0f}"
        lo, hi = 8, n - 8
        s = slice(lo, hi)
        print("  period", r(d[7, lo+1:hi+1] - d[7, s]), " rows: issue", r(d[1, s] - d[0, s]), "wait free after own issue", r(d[0, lo+1:hi+1] - d[1, s]), " tokens: issue", r(d[3, s] - d[2, s]), "wait", r(d[2, lo+1:hi+1] - d[3, s]))
        for wg in range(4):
            a = d[4 + 4*wg: 8 + 4*wg]; ok = a[3, s] != 0
            print(f"  wg{wg} wait has", r((a[1]-a[0])[s]), "to x there (first unpack)", r((a[2]-a[1])[s]), "rest", r((a[3]-a[2])[s]), "between", r(a[0, lo+1:hi+1]-a[3, s]), " rows issued->has", r((a[1] - d[1])[s]), "min", int((a[1]-d[1])[s].min()))
        ends = torch.stack([d[7 + 4*w] for w in range(4)])
        print("  last wg end -> producer sees free (same slot):", [int(z) for z in (d[0, 20:28] - ends.max(0).values[20 - m.stages_of(block):28 - m.stages_of(block)])], "spread of ends", r((ends.max(0).values - ends.min(0).values)[s]))
        for i in range(20, 32): out.write(f"{v} {case} {i} " + " ".join(str(int(z)) for z in d[:, i]) + "\n")
os._exit(0)
