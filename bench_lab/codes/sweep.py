"""sweep.py SRC part: shapes of fp8 products at 129 to 256 rows; the gate; rotation."""
import sys, os, torch, itertools, importlib.util
SRC, part = sys.argv[1], sys.argv[2]; COMPILE = os.environ.get("SLICE")
from quire.kernels.codes import *
from quire.kernels.triton.codes import tiles_product as tp
from quire.kernels.triton.pdl import pdl_launch
from quire.kernels.scaled_product import _scaled_product, quantise
from quire.kernels.fp8 import FP8
dev = torch.device("cuda"); g = torch.Generator(dev).manual_seed(0); pdl = pdl_launch(dev)
def timed(calls, rounds=7, title=""):
    graphs = {}
    for n, f in calls.items():
        try:
            f(); torch.cuda.synchronize()
            if COMPILE: continue
            gr = torch.cuda.CUDAGraph()
            with torch.cuda.graph(gr): f()
            graphs[n] = gr
        except Exception as e: print("   FAILED", n, repr(e)[:150], flush=True)
    if COMPILE: return
    t = {n: [] for n in graphs}
    for _ in range(rounds):
        for n, gr in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            gr.replay(); a.record(); gr.replay(); gr.replay(); b.record(); b.synchronize(); t[n].append(a.elapsed_time(b) / 2 / 16 * 1e3)
    print(title, "  ".join(f"{n}: {sorted(v)[len(v)//2]:.1f}" for n, v in sorted(t.items(), key=lambda z: sorted(z[1])[len(z[1])//2])), flush=True)
def product(x, weight, scales, shape, parts):
    (rows, columns), features = x.values.shape, len(weight)
    out = torch.empty((rows, features), dtype=x.dtype, device=dev)
    sums = out if parts == 1 else torch.empty((parts, rows, features), dtype=torch.float32, device=dev)
    tp._multiply_tiles[(tp._tiles(rows, features, shape), parts)](
        tp.TensorDescriptor.from_tensor(x.values, [shape.rows, 128]), tp.TensorDescriptor.from_tensor(weight, [shape.features, 128]),
        x.scales, scales.values, out, sums, rows, features, columns, scales.values.stride(0), x.scales.stride(1),
        ROWS=shape.rows, FEATURES=shape.features, COLUMNS=128, BAND=8, PARTS=parts, SCALE_ROWS=scales.rows, GROUPED=False, BIASED=False, IS_INT=False,
        num_warps=shape.warps, num_stages=shape.stages, **pdl)
    if parts > 1:
        tp._add_parts[(rows, tp.cdiv(features, 1024))](sums, x.scales, scales.values, out, out, rows, features, PARTS=parts, WIDTH=1024, GROUPED=False, BIASED=False, **pdl)
    return out
S = tp._Shape
if part == "products":
    cands = [(S(64,64,4,6),1),(S(64,64,4,6),2),(S(64,128,4,5),1),(S(64,128,4,5),2),(S(128,64,4,5),1),(S(128,64,4,5),2),(S(128,128,4,5),1),(S(128,128,4,5),2),(S(128,128,8,5),1),(S(128,128,8,5),2),(S(128,128,8,5),3),(S(128,256,8,4),1),(S(128,256,8,4),2),(S(128,256,8,4),4),(S(256,128,8,4),1),(S(256,128,8,4),2),(S(256,128,8,4),4),(S(256,64,8,5),1),(S(256,64,8,5),2)]
    if COMPILE: cands = cands[int(COMPILE)::8]
    for name, features, columns, copies in (("o", 4096, 4096, 8), ("down", 4096, 12288, 4), ("qkv", 6144, 4096, 8), ("gate_up", 24576, 4096, 2)):
        ws = [torch.randn(features, columns, device=dev, generator=g).to(FP8) for _ in range(copies)]
        sc = BlockScales(torch.rand(features, 1, device=dev, generator=g), 1, columns)
        for rows in (256,) if COMPILE else (160, 192, 256):
            x = quantise(torch.randn(rows, columns, device=dev, generator=g).bfloat16(), CodeFormat())
            right = _scaled_product(x, ws[0], sc, None).float()
            calls = {"torch": lambda: [_scaled_product(x, ws[i % copies], sc, None) for i in range(16)]}
            for shape, parts in cands:
                if tp._tiles(rows, features, shape) * parts > 132 * 3: continue
                calls[f"{shape.rows}x{shape.features}w{shape.warps}p{parts}"] = lambda shape=shape, parts=parts: [product(x, ws[i % copies], sc, shape, parts) for i in range(16)]
                if not COMPILE:
                    e = (product(x, ws[0], sc, shape, parts).float() - right).norm() / right.norm()
                    if e > 5e-3: print("WRONG", shape, parts, float(e))
            timed(calls, title=f"{name} {rows}:")
else:
    def lab(name, edits, src):
        t = open(f"{SRC}/quire/kernels/triton/{src}").read()
        for a, b in edits: assert a in t, a; t = t.replace(a, b)
        p = os.path.dirname(os.path.abspath(__file__)) + f"/{name}.py"; (None if os.path.exists(p) else open(p, "w").write(t))
        return importlib.import_module(name)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    act = lab("act_lab", [("num_warps=min(16, max(4, width // 1024)),", "**MORE,"), ("_WIDTH = 1024", "_WIDTH = 1024\nMORE = {}")], "act_and_mul.py")
    rot = lab("rot_lab", [("at_once = 1024 if tokens <= _FEW else 8192", "at_once = AT_ONCE"), ("        **pdl_launch(qkv.device),", "        num_warps=WARPS,\n        **pdl_launch(qkv.device),"), ("_FEW = 64", "AT_ONCE = WARPS = 0\n_FEW = 64")], "rotate.py")
    from quire.kernels.activation import Activation
    for rows in (64,) if COMPILE else (64, 128, 256, 2048):
        gus = [torch.randn(rows, 24576, device=dev, generator=g).bfloat16() for _ in range(2)]
        calls = {}
        for w, r in ((16, None), (8, None), (32, None), (16, 64), (8, 128), (16, 128))[int(COMPILE or 0)::7 if COMPILE else 1]:
            def f(w=w, r=r):
                act.MORE = {"num_warps": w, **({"maxnreg": r} if r else {})}
                return [act.quantised_gate(gus[i % 2], Activation.SILU, CodeFormat()) for i in range(16)]
            calls[f"w{w}r{r}"] = f
        timed(calls, title=f"gate {rows}:")
    from quire.kernels.pages import LayerPages; from quire.kernels.plain import HeadScale, Rotation
    for heads, kvh, normed, fp8 in ((32, 8, True, True), (32, 8, True, False), (64, 8, False, False), (16, 8, True, False)):
        d = 64 if heads == 64 else 128
        for rows in (32,) if COMPILE else (32, 64, 128, 256, 1024, 8192):
            n = rows // 16 + 8
            pool = torch.zeros(n, 2, kvh, 16, d, device=dev, dtype=FP8 if fp8 else torch.bfloat16); sc = torch.zeros(n, 2, kvh, 16, device=dev)
            pages = LayerPages(pool[:, 0], pool[:, 1], *((sc[:, 0], sc[:, 1]) if fp8 else ()))
            slots = torch.randperm(n * 16, device=dev, generator=g)[:rows]
            qkv = torch.randn(rows, (heads + 2 * kvh) * d, device=dev, generator=g).bfloat16()
            rt = Rotation(*(torch.randn(rows, 1, d, device=dev, generator=g).bfloat16() for _ in range(2)))
            hs = HeadScale(torch.randn(heads + kvh, d, device=dev, generator=g).bfloat16(), 1e-6) if normed else None
            calls = {}
            for a, w in ((1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 4), (8192, 8))[int(COMPILE or 0)::7 if COMPILE else 1]:
                def f(a=a, w=w):
                    rot.AT_ONCE, rot.WARPS = a, w
                    return [rot.rotate_and_write(qkv, hs, rt, pages, slots) for i in range(16)]
                calls[f"{a}w{w}"] = f
            timed(calls, rounds=5, title=f"rotate h{heads} kv{kvh} d{d} norm {normed} fp8 {fp8} rows {rows}:")
os._exit(0)
