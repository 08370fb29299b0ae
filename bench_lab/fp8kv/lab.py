"""Decode attention over fp8 KV on an H200: today's kernel, variants, and bf16 beside them.

    sh bench_lab/fp8kv/run.sh     from the repository's root: under 45 s

Builds each variant in a process of its own (the cache may be empty), holds each to float64, then
times graphs of four layers, variants in turn, and prints medians in microseconds a layer and the
percentage of the copy rate that the bytes of K, V and scales make.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

BEGUN = time.time()
SECONDS = float(os.environ.get("LAB_SECONDS", "43"))
LAYERS, KV_HEADS, DIM, BLOCK = 4, 8, 128, 16

import torch  # noqa: E402

from quire.kernels.batch import AttentionBatch  # noqa: E402
from quire.kernels.fp8 import FP8, scales_of  # noqa: E402
from quire.kernels.pages import pages_of  # noqa: E402
from quire.kernels.reference import ReferenceBackend  # noqa: E402
from quire.kernels.scoring import Scoring  # noqa: E402
from quire.kernels.triton.attention import decode  # noqa: E402
from quire.kv.layout import KVLayout  # noqa: E402
from quire.kv.pool import PagedKVCache  # noqa: E402

Shape = decode._Shape
TODAY = Shape(32, 1, 3, 8)
# Name: today's kernel with a shape; or tokens, registers and programs of the new one; or the same
# with the stages of its ring (`ring.py`).
VARIANTS = {
    "bf16": None,
    "today": ("today", TODAY),
    "today 64,2,3": ("today", Shape(64, 2, 3, 4)),
    "words 16,128": ("words", (16, 128, 16)),
    "words 16,168": ("words", (16, 168, 12)),
    "words 32,168": ("words", (32, 168, 12)),
    "words 32,255": ("words", (32, 255, 8)),
    "ring 16,3": ("ring", (16, 128, 16, 3)),
    "ring 16,4": ("ring", (16, 128, 12, 4)),
    "ring 16,6": ("ring", (16, 128, 8, 6)),
    "ring 32,2": ("ring", (32, 168, 12, 2)),
    "ring 32,3": ("ring", (32, 168, 8, 3)),
}
GROUPS = {"0.6B": 2, "8B": 4}


def nano(steps: int) -> list[int]:
    r = random.Random(0)
    lengths = []
    for _ in range(256):
        length = r.randint(100, 1024)
        for _ in range(length):
            r.randint(0, 10000)
        lengths.append(length + steps)
    return lengths


CASES = [
    ("0.6B", "256 as nano", nano(70)),
    ("8B", "256 as nano", nano(70)),
    ("8B", "256 x 700", [700] * 256),
    ("8B", "256 x 800", [800] * 256),
    ("8B", "64 x 4096", [4096] * 64),
]


@contextmanager
def using(variant):
    """The kernel of this variant, in its shape."""
    from quire.kernels.triton.attention import hopper_fp8_decode as words

    before = decode._goes_to_registers, decode._FP8_SHAPES[False], words.attend, words.SHAPE
    is_new = variant is not None and variant[0] != "today"
    decode._goes_to_registers = lambda *_: is_new
    if is_new and variant[0] == "ring":
        import ring

        words.attend, words.SHAPE = ring.attend, ring.RingShape(*variant[1])
    elif is_new:
        words.SHAPE = words.WordsShape(*variant[1])
    elif variant is not None:
        decode._FP8_SHAPES[False] = variant[1]
    try:
        yield
    finally:
        decode._goes_to_registers, decode._FP8_SHAPES[False], words.attend, words.SHAPE = before


def pool(blocks: int, is_fp8: bool):
    """Layers of random KV: numbers of both signs, no NaN, scales that differ."""
    dtype = FP8 if is_fp8 else torch.bfloat16
    layout = KVLayout.plain(LAYERS, KV_HEADS, DIM, BLOCK, dtype)
    cache = PagedKVCache(layout, blocks, torch.device("cuda"), ReferenceBackend()).tensor
    if is_fp8:
        codes = torch.randint(0, 0x7F, cache.shape, dtype=torch.uint8, device="cuda")
        codes |= torch.randint(0, 2, cache.shape, dtype=torch.uint8, device="cuda") << 7
        cache.view(torch.uint8).copy_(codes)
        scales_of(cache).uniform_(0.002, 0.01)
    else:
        cache.normal_()
    return pages_of(cache)


def batch_of(contexts: list[int], blocks: int) -> AttentionBatch:
    counts = [-(-context // BLOCK) for context in contexts]
    order = torch.randperm(blocks - 1).add_(1).tolist()
    tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    return AttentionBatch(
        slot_mapping=torch.zeros(len(contexts), dtype=torch.int64, device="cuda"),
        block_tables=tables.cuda(),
        query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        query_lens=[1] * len(contexts),
        contexts=contexts,
    )


def attend(q, pages, batch, scoring):
    """All layers, as a step has them: split once, then each layer's."""
    outs = [torch.full_like(q, torch.nan) for _ in pages]
    splits = decode.split_decodes(batch, q, pages[0], None, 1)
    for number, (layer, out) in enumerate(zip(pages, outs, strict=True)):
        decode.decode_attention(q, layer, batch, splits, scoring, out, just_split=number == 0)
    return outs


def numbers(values, scales, blocks):
    """K or V of these blocks, `[KV_HEADS, tokens, DIM]`."""
    found = values[blocks].double()
    if scales is not None:
        found = found * scales[blocks].double()[..., None]
    return found.transpose(0, 1).reshape(KV_HEADS, -1, DIM)


def poison(pages, batch):
    """Make NaN what no kernel may count: block 0, and slots past the end of each sequence."""
    for layer in pages:
        for values, scales in ((layer.k, layer.k_scales), (layer.v, layer.v_scales)):
            is_fp8 = scales is not None
            raw = values.view(torch.uint8) if is_fp8 else values
            raw[0] = 0x7F if is_fp8 else torch.nan
            if is_fp8:
                scales[0] = torch.nan
            for row, context in enumerate(batch.contexts):
                if context % BLOCK:
                    last = int(batch.block_tables[row, context // BLOCK])
                    raw[last, :, context % BLOCK :] = 0x7F if is_fp8 else torch.nan
                    if is_fp8:
                        scales[last, :, context % BLOCK :] = torch.nan


def exact(q, layer, batch, scoring):
    out = torch.empty(q.shape, dtype=torch.float64, device="cuda")
    for row, context in enumerate(batch.contexts):
        blocks = batch.block_tables[row, : -(-context // BLOCK)].long()
        k = numbers(layer.k, layer.k_scales, blocks)[:, :context]
        v = numbers(layer.v, layer.v_scales, blocks)[:, :context]
        heads = q[row].double().view(KV_HEADS, -1, DIM)
        scores = heads @ k.transpose(1, 2) * scoring.scale
        out[row] = (torch.softmax(scores, -1) @ v).reshape(-1, DIM)
    return out


def error(name: str, group: int) -> float:
    variant = VARIANTS[name]
    torch.manual_seed(1)
    contexts = [1, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 333, 700, 701, 1024, 4000, 9000, 2, 640]
    blocks = 2 + sum(-(-context // BLOCK) for context in contexts)
    pages, batch = pool(blocks, variant is not None), batch_of(contexts, blocks)
    q = torch.randn(len(contexts), KV_HEADS * group, DIM, device="cuda").bfloat16()
    scoring = Scoring(DIM**-0.5)
    poison(pages, batch)
    with using(variant):
        outs = attend(q, pages, batch, scoring)
        torch.cuda.synchronize()
    wrong = 0.0
    for layer, out in zip(pages, outs, strict=True):
        wanted = exact(q, layer, batch, scoring)
        wrong = max(wrong, float((out.double() - wanted).norm() / wanted.norm()))
        assert torch.isfinite(out).all(), f"{name}: what is not a number"
    return wrong


def build_all() -> list[str]:
    """Each variant in a process, held to float64 there. Those that fail or hang are left out."""
    jobs = {
        (name, model): subprocess.Popen(
            [sys.executable, __file__, "--build", name, model],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name in VARIANTS
        for model in GROUPS
    }  # fmt: skip
    good = dict.fromkeys(VARIANTS, True)
    for (name, model), job in jobs.items():
        try:
            text, _ = job.communicate(timeout=max(1.0, SECONDS - 16 - (time.time() - BEGUN)))
        except subprocess.TimeoutExpired:
            job.kill()
            text = "did not end"
        if job.returncode:
            good[name] = False
        last = text.strip().splitlines()[-1:] or ["nothing said"]
        print(f"{name:14s} {model:5s} {last[0][:110]}", flush=True)
    return [name for name, is_good in good.items() if is_good]


def captured(name, q, pages, batch, scoring):
    with using(VARIANTS[name]), torch.inference_mode():
        attend(q, pages, batch, scoring)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(q, pages, batch, scoring)
    return graph


def microseconds(graph, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / times / LAYERS


def copy_rate() -> float:
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    found = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        found.append(2 * x.numel() / begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def main() -> None:
    names = build_all()
    print(f"built and checked after {time.time() - BEGUN:.1f} s: {', '.join(names)}", flush=True)
    rate = copy_rate()
    print(f"copies at {rate / 1e12:.2f} TB/s", flush=True)
    scoring = Scoring(DIM**-0.5)
    for model, label, contexts in CASES:
        if time.time() - BEGUN > SECONDS - 4:
            print("no time left for", model, label)
            continue
        torch.manual_seed(0)
        blocks = 1 + sum(-(-context // BLOCK) for context in contexts)
        batch = batch_of(contexts, blocks)
        pools = {is_fp8: pool(blocks, is_fp8) for is_fp8 in (True, False)}
        q = torch.randn(len(contexts), KV_HEADS * GROUPS[model], DIM, device="cuda").bfloat16()
        graphs = {
            name: captured(name, q, pools[VARIANTS[name] is not None], batch, scoring)
            for name in names
        }
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(9):
            for name, graph in graphs.items():
                taken = microseconds(graph, 4)
                if turn:
                    found[name].append(taken)
        print(f"\n{model} {label}: µs a layer, % of the copy rate (least to most)")
        for name, each in found.items():
            size = 2 * DIM if VARIANTS[name] is None else DIM + 4
            limit = sum(contexts) * KV_HEADS * 2 * size / rate * 1e6
            median = statistics.median(each)
            print(
                f"  {name:14s} {median:7.1f}  {100 * limit / median:5.1f} %  "
                f"({min(each):.1f} to {max(each):.1f}; bytes {limit:.1f})",
                flush=True,
            )
        del graphs, pools
        torch.cuda.empty_cache()
    print(f"\n{time.time() - BEGUN:.1f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        wrong = error(sys.argv[2], GROUPS[sys.argv[3]])
        print(f"off by {wrong:.2e} of float64's norm")
        sys.exit(wrong > 6e-3)
    main()
