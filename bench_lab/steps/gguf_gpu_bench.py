"""python build/gguf_gpu_bench.py [types] [shapes]: GGUF products on a GPU. Random codes; no gguf package."""
import sys, time
sys.path.insert(0, "src")
import torch
import torch.nn.functional as F
from concurrent.futures import ThreadPoolExecutor
from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_tiles import to_tiles
from quire.kernels.triton.gguf.product import gguf_linear
from quire.kernels.triton.gguf.rows import dequantise

PEAK = 4.28e12
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
ROWS = [1, 2, 4, 8, 9, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096]
HALVES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2),
             "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}
types = sys.argv[1].split(",") if len(sys.argv) > 1 else ["Q4_K", "Q6_K", "Q8_0", "Q4_0"]
shapes = [SHAPES[int(i)] for i in sys.argv[2].split(",")] if len(sys.argv) > 2 else SHAPES
dev, bf = "cuda", torch.bfloat16
if dev == "cuda": torch.cuda.init()

def stored(type_, rows, cols):
    b = TYPES[type_]
    raw = torch.randint(0, 256, (rows, cols // b.values, b.bytes), dtype=torch.uint8, device=dev)
    for at in HALVES_AT[type_]:
        s = torch.empty(raw.shape[:2], device=dev).uniform_(1e-4, 1e-3).half()
        raw[..., at:at + 2] = s[..., None].view(torch.uint8)
    if type_ == "MXFP4":
        raw[..., 0] = torch.randint(118, 126, raw.shape[:2], dtype=torch.uint8, device=dev)
    return raw.flatten(1)

def timed(call, copies, reps=None):
    """Microseconds a call, in a CUDA graph that goes through all copies."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2): call(i % copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    n = max(copies, 8) if reps is None else reps
    with torch.cuda.graph(graph):
        for i in range(n): call(i % copies)
    graph.replay(); torch.cuda.synchronize()
    best = 1e9
    for _ in range(4):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) * 1e3 / n)
    return best

t0 = time.time()
def warm(job):
    type_, shape, rows = job
    m = to_tiles(type_, stored(type_, 256, shape[1]))
    gguf_linear(torch.randn(rows, shape[1], device=dev, dtype=bf), m, None)
with ThreadPoolExecutor(8) as pool:  # compiles
    list(pool.map(warm, [(t, s, r) for t in types for s in shapes for r in (1, 12, 33, 70, 100, 180, 200, 600, 4096)]))
torch.cuda.synchronize()
print(f"compiled {time.time() - t0:.0f} s", flush=True)
dense = {}
for shape in shapes:
    copies = max(2, min(8, int(300e6 / (shape[0] * shape[1] * 2)) + 1))
    ws = [torch.randn(shape, device=dev, dtype=bf) for _ in range(copies)]
    for r in ROWS:
        x = torch.randn(r, shape[1], device=dev, dtype=bf)
        dense[shape, r] = timed(lambda i: F.linear(x, ws[i]), copies, 4 if r > 512 else None)
    del ws
for type_ in types:
    for shape in shapes:
        first = to_tiles(type_, stored(type_, *shape))
        size = first.kind.num_bytes(*shape)
        copies = max(2, min(24, int(250e6 / size) + 1))
        ms = [first] + [first._replace(**{n: getattr(first, n).clone() for n in ("codes", "upper", "scale", "wide")}) for _ in range(copies - 1)]
        numbers = dequantise(first, torch.float32)
        print(f"{type_} {shape[0]}x{shape[1]} {size / 1e6:.1f} MB {size * 8 / shape[0] / shape[1]:.2f} bits", flush=True)
        for r in ROWS:
            x = torch.randn(r, shape[1], device=dev, dtype=bf)
            try:
                got = gguf_linear(x, first, None).float()
                want = (x.double() @ numbers.double().T).float() if r <= 256 else x.float() @ numbers.T
                err = ((got - want).abs().max() / want.abs().max()).item()
                us = timed(lambda i: gguf_linear(x, ms[i], None), copies, 4 if r > 512 else None)
            except Exception as e:
                print(f"  {r:5d} {type(e).__name__}: {str(e)[:200]}", flush=True); continue
            rate = size / us * 1e6
            print(f"  {r:5d} {us:8.1f} us {rate / 1e9:6.0f} GB/s {rate / PEAK:4.0%} bf16 {dense[shape, r]:8.1f} us x{us / dense[shape, r]:.2f} err {err:.1e}", flush=True)
print(f"all {time.time() - t0:.0f} s")
