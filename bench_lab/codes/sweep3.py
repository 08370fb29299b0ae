"""sweep2.py: fp8 products at rows that fill no tile, as they are and with rows to spare."""
import sys, os, torch
src = open(os.path.dirname(os.path.abspath(__file__)) + "/sweep.py").read()
sys.argv = [sys.argv[0], sys.argv[1], "none"]
exec(src.split("S = tp._Shape")[0])
S = tp._Shape
def product2(x, weight, scales, shape, parts, rows, pad, grouped):
    columns, features = x.values.shape[1], len(weight)
    out = torch.empty((rows, features), dtype=x.dtype, device=dev)
    sums = out if parts == 1 else torch.empty((parts, rows, features), dtype=torch.float32, device=dev)
    shown = -(-rows // pad) * pad if pad else rows
    tp._multiply_tiles[(tp._tiles(rows, features, shape), parts)](
        tp.TensorDescriptor(x.values, [shown, columns], [columns, 1], [shape.rows, 128]), tp.TensorDescriptor.from_tensor(weight, [shape.features, 128]),
        x.scales, scales.values, out, sums, rows, features, columns, scales.values.stride(0), x.scales.stride(1),
        ROWS=shape.rows, FEATURES=shape.features, COLUMNS=128, BAND=8, PARTS=parts, SCALE_ROWS=scales.rows, GROUPED=grouped, BIASED=False, IS_INT=False,
        num_warps=shape.warps, num_stages=shape.stages, **pdl)
    if parts > 1:
        tp._add_parts[(rows, tp.cdiv(features, 1024))](sums, x.scales, scales.values, out, out, rows, features, PARTS=parts, WIDTH=1024, GROUPED=grouped, BIASED=False, **pdl)
    return out
cands = [(S(64,64,4,6),1),(S(64,64,4,6),2),(S(64,128,4,5),1),(S(64,128,4,5),2),(S(128,128,4,5),2),(S(128,256,8,4),1)]
if COMPILE: cands = cands[int(COMPILE)::6]
for grouped in (False, True):
  for name, features, columns, copies in (("o", 4096, 4096, 8), ("down", 4096, 12288, 4), ("qkv", 6144, 4096, 8), ("gate_up", 24576, 4096, 2)):
    ws = [torch.randn(features, columns, device=dev, generator=g).to(FP8) for _ in range(copies)]
    sc = BlockScales(torch.rand(features // 128, columns // 128, device=dev, generator=g), 128, 128) if grouped else BlockScales(torch.rand(features, 1, device=dev, generator=g), 1, columns)
    for rows in (80,) if COMPILE else ((24, 32, 48, 56, 288, 416) if not grouped else (32, 80, 160, 208, 288)):
        big = quantise(torch.randn(512, columns, device=dev, generator=g).bfloat16(), CodeFormat(128 if grouped else None))
        exact = {n: quantise(torch.randn(n, columns, device=dev, generator=g).bfloat16(), CodeFormat(128)) for n in (rows, 256, 384, 512)} if grouped else {}
        def of(n): return Codes(big.values[:n], big.scales[:n], big.dtype)
        calls = {}
        sizes = sorted({rows, 256 if rows < 256 else 384, 512}) if grouped else sorted({rows, -(-rows // 64) * 64, -(-rows // 128) * 128, 256 if rows < 256 else 512})
        for n in sizes: calls[f"torch{n}"] = lambda n=n: [_scaled_product(exact.get(n) or of(n), ws[i % copies], sc, None) for i in range(16)]
        for shape, parts in cands:
            if grouped and (shape.features > 64 or rows > 256): continue
            if tp._tiles(rows, features, shape) * parts > 132 * 3: continue
            for pad in (0, shape.rows):
                calls[f"{shape.rows}x{shape.features}p{parts}{'+' if pad else ''}"] = lambda shape=shape, parts=parts, pad=pad: [product2(of(rows), ws[i % copies], sc, shape, parts, rows, pad, grouped) for i in range(16)]
        cur = "64x64" if tp.is_tiled(rows, features, not grouped, dev) else "torch"
        par = 2 if tp._is_shared(tp._tiles(rows, features, tp._SMALL), columns, dev) else 1
        timed(calls, rounds=5, title=f"{'blocks ' if grouped else ''}{name} {rows} (now {cur}{'p%d' % par if cur != 'torch' else ''}):")
os._exit(0)
