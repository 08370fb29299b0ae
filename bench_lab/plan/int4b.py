"""Four-bit products of Qwen3-8B's shapes on a GPU: right first, then how long each kernel takes.

    python bench_lab/int4.py [--rows 1,2,4,8,16,64,256,512] [--out FILE]

Kernels are compiled by several processes first. Each kernel's launches are recorded in a graph that
goes through more weights than any cache holds; the kernels' graphs take turns, and the medians of
their times are shown: µs, and the share of the copy rate at which the matrix was read. `layer` has
the four products of several layers one after the other, as one stream has them, so that what
overlaps counts. `before` is the kernel of many rows as it was (`int4_many_before.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, os.getcwd() + "/src")

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.dequantise import from_codes, spread
from quire.kernels.int4_tiles import Int4Tiles, rows_by_tiles, rows_of_tiles
from quire.kernels.triton.int4 import few, few_digits, hopper_many
from quire.kernels.triton.int4.few_digits import Shape

DTYPE, GROUP = torch.bfloat16, 128
ROTATED = 400e6  # bytes of weights that a graph goes through
ROUNDS = 7
COMPILERS = 12


class Product(NamedTuple):
    name: str
    features: int
    columns: int
    activation: Activation | None = None


PRODUCTS = [
    Product("qkv", 6144, 4096),
    Product("o", 4096, 4096),
    Product("gate_up", 24576, 4096, Activation.SILU),
    Product("down", 4096, 12288),
]
# Of the digits' kernel, by product: warps, tiles of a step, steps ahead. The first is the default.
SHAPES = {
    "qkv": [Shape(4, 32, 1), Shape(2, 16, 2), Shape(4, 16, 2), Shape(2, 32, 1), Shape(2, 8, 4), Shape(1, 8, 3)],
    "o": [Shape(4, 32, 1), Shape(2, 16, 2), Shape(4, 16, 2), Shape(2, 32, 1), Shape(2, 8, 4), Shape(1, 8, 3)],
    "gate_up": [Shape(4, 8, 2), Shape(2, 8, 2), Shape(4, 8, 3), Shape(4, 16, 2), Shape(2, 4, 3), Shape(1, 4, 2)],
    "down": [Shape(8, 32, 1), Shape(4, 32, 1), Shape(4, 16, 2), Shape(8, 32, 2), Shape(4, 8, 4), Shape(2, 16, 2)],
}
# Rows of x for a program, beside what the kernel of many rows chooses by itself.
HEIGHTS = {160: [128, 256], 256: [64, 256]}
BROKEN: set[str] = set()  # kernels that failed or were wrong, which are not measured
Kernel = Callable[[Tensor, Int4Tiles, Activation | None], Tensor]


def kernels(product: Product, rows: int) -> dict[str, Kernel]:
    """All that can multiply so many rows."""
    found: dict[str, Kernel] = {}
    if rows <= 8:
        found["few"] = lambda x, m, a: few.few_rows(x, m, None, a, True)
    if rows <= 4:
        for shape in SHAPES[product.name]:
            found[name_of(shape)] = lambda x, m, a, s=shape: few_digits.few_rows(
                x, m, None, a, True, s
            )
    if rows > 2:
        found["many"] = lambda x, m, a: hopper_many.many_rows(x, m, None)
    for height in HEIGHTS.get(rows, ()):
        found[f"many/{height}"] = partial(at_height, height)
    return {name: kernel for name, kernel in found.items() if name not in BROKEN}


USUAL = hopper_many._height


def at_height(height, x, m, a):
    hopper_many._height = lambda rows: height
    try:
        return hopper_many.many_rows(x, m, None)
    finally:
        hopper_many._height = USUAL


def name_of(shape: Shape) -> str:
    return "digits " + "/".join(map(str, shape))


def make(product: Product) -> Int4Tiles:
    shape = (product.features, product.columns // 4)
    words = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")
    groups = (product.features, product.columns // GROUP)
    scale = (torch.rand(groups, device="cuda") + 0.5) / (4 * product.columns**0.5)
    return Int4Tiles(words, scale.to(DTYPE), None, GROUP)


def numbers_of(matrix: Int4Tiles) -> Tensor:
    """By plain operations."""
    rows = torch.arange(len(matrix.words), device="cuda")
    codes = rows_of_tiles(matrix.words.view(torch.uint8), rows)
    scales = rows_by_tiles(matrix.scale, rows)
    return from_codes(codes, spread(scales, GROUP, codes.shape[1]), None, middle=8)


def check(rows_of_x: list[int]) -> bool:
    """Against float64; NaN in what is not written."""
    for product in PRODUCTS:
        matrix = make(product)
        numbers = numbers_of(matrix).to(DTYPE).double()
        for rows in rows_of_x:
            x = torch.randn(rows, product.columns, device="cuda", dtype=DTYPE)
            wanted = x.double() @ numbers.T
            gate, up = wanted.chunk(2, dim=1)
            gated = F.silu(gate) * up
            for name, kernel in kernels(product, rows).items():
                try:
                    out = kernel(x, matrix, product.activation)
                except Exception as error:  # the others are measured all the same
                    BROKEN.add(name)
                    print(f"FAILED {product.name} rows {rows} {name}: {error}"[:600], flush=True)
                    continue
                is_gated = product.activation is not None and name.startswith(("few", "digits"))
                ref = gated if is_gated else wanted
                off = ((out.double() - ref).norm() / ref.norm()).item()
                if not off < 1e-2:
                    BROKEN.add(name)
                    print(f"WRONG {product.name} rows {rows} {name}: {off:.2e}", flush=True)
    return not BROKEN


def graph_of(launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return graph


def timed(graphs: dict[str, torch.cuda.CUDAGraph], launches: int) -> dict[str, float]:
    """Median µs of a launch, the graphs in turn."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / launches)
    return {name: statistics.median(times) for name, times in found.items()}


def each_of(
    kernel: Callable[..., Tensor], x: Tensor, weights: list[Any], activation: Activation | None
) -> None:
    for weight in weights:
        kernel(x, weight, activation)


def copy_rate() -> float:
    """Bytes a second, those read and those written."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    graph = graph_of(lambda: b.copy_(a))
    return 2 * a.nbytes / timed({"copy": graph}, 1)["copy"] * 1e6


def measure(product: Product, rows_of_x: list[int], rate: float) -> list[dict[str, object]]:
    size = product.features * product.columns // 2
    matrices = [make(product) for _ in range(max(2, int(ROTATED / size)))]
    wide = [
        torch.randn(product.features, product.columns, device="cuda", dtype=DTYPE) / 64
        for _ in range(max(2, int(ROTATED / size / 4)))
    ]
    read = matrices[0].words.nbytes + matrices[0].scale.nbytes
    found: list[dict[str, object]] = []
    for rows in rows_of_x:
        x = torch.randn(rows, product.columns, device="cuda", dtype=DTYPE)
        graphs = {}
        for name, kernel in kernels(product, rows).items():
            graphs[name] = graph_of(partial(each_of, kernel, x, matrices, product.activation))
        times = timed(graphs, len(matrices))
        bf16 = graph_of(partial(each_of, lambda x, w, _: F.linear(x, w), x, wide, None))
        times |= timed({"bf16": bf16}, len(wide))
        for name, us in times.items():
            share = read / (us * 1e-6) / rate if name != "bf16" else None
            found.append({"product": product.name, "rows": rows, "kernel": name, "us": round(us, 2),
                          "share": share and round(share, 3)})  # fmt: skip
        print(f"{product.name:8} {rows:4} ", end="")
        print("  ".join(f"{name}: {us:.2f}" for name, us in times.items()), flush=True)
    return found


def layers(rows_of_x: list[int], count: int = 8) -> list[dict[str, object]]:
    """The four products one after the other: µs a layer."""
    weights = [[make(product) for product in PRODUCTS] for _ in range(count)]
    found: list[dict[str, object]] = []
    for rows in rows_of_x:
        inputs = [torch.randn(rows, p.columns, device="cuda", dtype=DTYPE) for p in PRODUCTS]
        choices = {name: [name] * 4 for name in ("few",)}
        for i in range(6):
            choices[f"digits {i}"] = [name_of(SHAPES[product.name][i]) for product in PRODUCTS]
        graphs = {}
        for choice, names in choices.items():
            by_name = [kernels(product, rows) for product in PRODUCTS]
            if all(name in of_product for name, of_product in zip(names, by_name, strict=True)):
                chosen = [of_product[name] for name, of_product in zip(names, by_name, strict=True)]
                graphs[choice] = graph_of(partial(through_layers, chosen, weights, inputs))
        times = timed(graphs, count)
        print(f"layer    {rows:4} ", "  ".join(f"{n}: {us:.2f}" for n, us in times.items()))
        found += [{"layer": True, "rows": rows, "kernel": n, "us": us} for n, us in times.items()]
    return found


def through_layers(
    chosen: list[Kernel], weights: list[list[Int4Tiles]], inputs: list[Tensor]
) -> None:
    for layer in weights:
        for kernel, product, matrix, x in zip(chosen, PRODUCTS, layer, inputs, strict=True):
            kernel(x, matrix, product.activation)


def compile_some(number: int, rows_of_x: list[int]) -> None:
    """This process's share: each kernel launched once."""
    jobs = []
    for product in PRODUCTS:
        for rows in rows_of_x:
            for name in kernels(product, rows):
                jobs.append((product, rows, name))
    made: dict[str, Int4Tiles] = {}
    for product, rows, name in jobs[number::COMPILERS]:
        matrix = made.setdefault(product.name, make(product))
        x = torch.randn(rows, product.columns, device="cuda", dtype=DTYPE)
        kernels(product, rows)[name](x, matrix, product.activation)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,160,256")
    parser.add_argument("--out", default=os.environ.get("OUT", ".") + "/int4.json")
    parser.add_argument("--compile", type=int)
    given = parser.parse_args()
    rows_of_x = [int(each) for each in given.rows.split(",")]
    if given.compile is not None:
        compile_some(given.compile, rows_of_x)
        return
    start = time.monotonic()
    command = [sys.executable, __file__, "--rows", given.rows, "--compile"]
    compilers = [subprocess.Popen([*command, str(i)]) for i in range(COMPILERS)]
    codes = [each.wait() for each in compilers]
    if any(codes):
        print("some kernels were not compiled; see above", flush=True)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    print("all kernels are right" if check(rows_of_x) else "SOME KERNELS ARE WRONG", flush=True)
    rate = copy_rate()
    print(f"copy rate {rate / 1e12:.2f} TB/s; µs of each product:", flush=True)
    found: list[dict[str, object]] = []
    for product in PRODUCTS:
        found += measure(product, rows_of_x, rate)
    found += layers([rows for rows in rows_of_x if rows <= 16])
    Path(given.out).write_text(json.dumps({"rate": rate, "found": found}, indent=1))
    print("\nshare of the copy rate, the fastest four-bit kernel of each:")
    for product in PRODUCTS:
        line = []
        for rows in rows_of_x:
            rows_found = [
                each for each in found
                if each.get("product") == product.name and each["rows"] == rows
                and each["kernel"] != "bf16"
            ]  # fmt: skip
            best = min(rows_found, key=lambda each: each["us"])  # type: ignore[arg-type, return-value]
            line.append(f"{rows}: {best['us']} µs {best['share']:.0%} ({best['kernel']})")
        print(f"{product.name:8}", "  ".join(line))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
