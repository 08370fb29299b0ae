"""Old and new kernels of experts on one GPU, in one command: `python bench_lab/experts.py`.

First each kernel is compared with products in float32; then old and new ones take turns, in graphs
over layers whose weights are not in the chip's cache. Processes of their own compile all
kernels at once before, so that most of the time on the GPU measures. What hangs is ended after 20
seconds, and the next group goes on.

    python bench_lab/experts.py                    # all groups, below 90 s on an H200's machine
    python bench_lab/experts.py --only gpt-oss     # one of them
    python bench_lab/experts.py --out DIR          # and all figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HANGS_AFTER = 20.0  # seconds in which the GPU answers nothing
GROUP_LIMIT = 60.0  # of a process, compiling included
COMPILERS = 4  # processes that compile a group's kernels
ROUNDS, REPLAYS = 7, 4
LAYERS = 2  # whose weights take turns
COPY, MATRIX = 4.28e12, 798e12  # bytes and operations a second, of the H200 of the tables
DEVICE = "cuda"
TOKENS = (1, 16, 64, 128, 256, 1024, 8192)


@dataclass(frozen=True)
class Model:
    experts: int
    top_k: int
    hidden: int
    features: int
    kind: str  # of weights: mxfp4, bf16 or fp8


MODELS = {
    "gpt-oss": Model(32, 4, 2880, 2880, "mxfp4"),
    "qwen3-bf16": Model(128, 8, 2048, 768, "bf16"),
    "qwen3-fp8": Model(128, 8, 2048, 768, "fp8"),
    "deepseek": Model(64, 6, 2048, 1408, "bf16"),
}

# Beside those of tiles.json: block, then columns, inner, warps and stages of both products.
TRIED = {
    "bf16": {
        8192: [
            (128, (64, 64, 4, 3), (128, 64, 4, 3)),  # two programs a processor
            (128, (128, 64, 8, 4), (256, 64, 8, 4)),
            (128, (128, 64, 8, 4), (128, 64, 4, 3)),
        ],
        1024: [(64, (64, 64, 4, 4), (128, 64, 4, 4)), (128, (64, 64, 4, 3), (128, 64, 4, 3))],
        256: [(32, (64, 128, 4, 3), (64, 128, 4, 4)), (32, (64, 64, 4, 6), (64, 64, 4, 6))],
    },
    "fp8": {
        8192: [(128, (64, 128, 4, 3), (128, 128, 4, 3)), (128, (128, 128, 8, 3), (128, 128, 8, 3))],
        1024: [(64, (64, 128, 4, 3), (64, 128, 4, 4)), (64, (64, 128, 8, 4), (128, 128, 8, 4))],
        256: [(16, (64, 128, 4, 4), (128, 128, 4, 4)), (32, (64, 128, 4, 4), (64, 128, 4, 4))],
    },
}


class Watchdog:
    """Ends the process if what it guards takes too long: a kernel that waits for ever cannot be
    stopped otherwise."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._what = ""
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        self._what, self._until = what, time.monotonic() + HANGS_AFTER
        yield
        self._until = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.25)
            until = self._until
            if until is not None and time.monotonic() > until:
                print(f"HANGS: {self._what}", flush=True)
                os._exit(3)


class Lab:
    """One model's layers, and its kernels by name."""

    def __init__(self, model: Model, layers: int) -> None:
        import torch

        torch.manual_seed(0)
        self.torch, self.model, self.watchdog = torch, model, Watchdog()
        self.dtype = torch.bfloat16
        self.layers = [self.mlps() for _ in range(layers)]

    # What is multiplied

    def mlps(self):
        from quire.kernels.activation import Activation, ClampedSwiGLU
        from quire.kernels.experts import ExpertMLPs

        model = self.model
        is_gpt_oss = model.kind == "mxfp4"
        return ExpertMLPs(
            model.experts,
            self.matrices(2 * model.features, model.hidden, is_gpt_oss),
            ClampedSwiGLU(1.702, 7.0) if is_gpt_oss else Activation.SILU,
            self.matrices(model.hidden, model.features, is_gpt_oss),
        )

    def matrices(self, rows: int, columns: int, biased: bool):
        from quire.kernels.codes import BlockScales
        from quire.kernels.experts import CodedExperts, ExpertMatrices
        from quire.kernels.four_bits import FourBitExperts, quarter_of

        torch, count = self.torch, self.model.experts
        bias = None
        if biased:
            bias = torch.randn(count, rows, device=DEVICE, dtype=self.dtype) * 0.1
        if self.model.kind == "mxfp4":
            quarter = quarter_of(columns)
            shape = (count, rows, quarter)
            codes = torch.randint(-(1 << 15), 1 << 15, shape, device=DEVICE, dtype=torch.int16)
            for i in range(4):  # what lies beyond the last column is 0
                beyond = columns - i * quarter
                if beyond < quarter:
                    codes[:, :, max(0, beyond) :] &= ~self.bits_of_quarter(i)
            words = torch.randint(118, 123, (count, quarter // 32, rows, 4), device=DEVICE)
            words = words.to(torch.uint8).view(torch.int32)[..., 0].contiguous()
            return ExpertMatrices(_unused, None, bias, FourBitExperts(codes, words))
        weights = torch.randn(count, rows, columns, device=DEVICE, dtype=self.dtype)
        weights *= columns**-0.5
        if self.model.kind == "bf16":
            return ExpertMatrices(_unused, weights, bias)
        codes = (weights * 16).to(torch.float8_e4m3fn)
        scales = torch.rand(count * rows // 128, columns // 128, device=DEVICE) / 16 + 1 / 32
        packed = CodedExperts(codes, BlockScales(scales, 128, 128))
        return ExpertMatrices(_unused, None, bias, packed)

    def bits_of_quarter(self, quarter: int) -> int:
        from quire.kernels.four_bits import E2M1_BITS

        bits = sum(1 << place for place in E2M1_BITS[quarter])
        return bits - (1 << 16) if bits >= 1 << 15 else bits

    def inputs(self, tokens: int):
        torch, model = self.torch, self.model
        from quire.kernels.experts import Routing

        x = torch.randn(tokens, model.hidden, device=DEVICE, dtype=self.dtype)
        scores = torch.randn(tokens, model.experts, device=DEVICE).softmax(-1)
        weights, experts = scores.topk(model.top_k)
        return x, Routing(experts, weights.to(self.dtype))

    # The kernels

    def variants(self, tokens: int) -> dict[str, Callable]:
        """By name; each takes x, routing and the layer."""
        from quire.kernels.triton.experts.mlps import experts

        found: dict[str, Callable] = {"main": experts}
        if self.model.kind == "mxfp4":
            found["all GPUs"] = self.on_all_gpus
            pairs = tokens * self.model.top_k / self.model.experts
            for block in (64, 128):
                if tokens > 2 and (block == 128 or pairs <= 64):
                    found[f"hopper {block}"] = self.on_hopper("hopper_fours", block)
            for block in (16, 32, 64):
                if tokens > 2 and block / 8 <= max(pairs, 2) <= block * 4:
                    found[f"narrow {block}"] = self.on_hopper("hopper_narrow", block)
            if "narrow 64" in found:
                found["narrow 2 x 32"] = self.on_hopper("hopper_narrow", 64, units=2)
            if tokens <= 2:
                del found["all GPUs"]
        else:
            for i, tiles in enumerate(TRIED[self.model.kind].get(tokens, [])):
                found[f"tiles {i}"] = self.with_tiles(tiles, None)
            if self.model.kind == "fp8" and tokens in (1024, 8192):
                found["tokens right"] = self.with_tiles(None, False)
        return found

    def on_all_gpus(self, x, routing, mlps):
        from quire.kernels.triton.experts import grouped_fours as kernel
        from quire.kernels.triton.experts.combine import sum_of_chosen
        from quire.kernels.triton.experts.mlps import sorted_pairs, tiles_of

        gate_up, down = mlps.gate_up.packed, mlps.down.packed
        width = 4 * down.codes.shape[2]
        tiles = tiles_of("four bits", x.shape[1], width, 2, routing, mlps)
        blocks, top_k = sorted_pairs(routing, mlps, tiles), routing.experts.shape[1]
        hidden = kernel.gated_product(
            x, gate_up, blocks, top_k, mlps.activation, mlps.gate_up.bias, tiles.gate_up
        )
        found = kernel.product(hidden, down, blocks, mlps.down.bias, tiles.down)
        return sum_of_chosen(found, routing, mlps.count)

    def on_hopper(self, name: str, block: int, **more: int) -> Callable:
        from importlib import import_module

        from quire.kernels.triton.experts.combine import sum_of_chosen
        from quire.kernels.triton.experts.gather import by_expert
        from quire.kernels.triton.experts.order import sort_by_expert

        product = import_module(f"quire.kernels.triton.experts.{name}").product

        def run(x, routing, mlps):
            blocks = sort_by_expert(routing.experts, mlps.count, block)
            tokens = by_expert(x, blocks, routing.experts.shape[1])
            gate_up, down = mlps.gate_up, mlps.down
            hidden = product(tokens, gate_up.packed, blocks, mlps.activation, gate_up.bias, **more)
            found = product(hidden, down.packed, blocks, None, down.bias, **more)
            return sum_of_chosen(found, routing, mlps.count)

        return run

    def with_tiles(self, tiles: tuple | None, tokens_left: bool | None) -> Callable:
        """The kernel of `mlps.py` with other tiles, or with the weights as left factor."""
        from quire.kernels.triton.experts import grouped, mlps
        from quire.kernels.triton.experts.tiles import Tile, Tiles

        def run(x, routing, layer):
            chosen, least = mlps.tiles_for, grouped._LEFT
            if tiles is not None:
                block, first, second = tiles
                made = Tiles(block, Tile(*first), Tile(*second))
                mlps.tiles_for = lambda *_: made
            if tokens_left is False:
                grouped._LEFT = 1 << 30
            try:
                return mlps.experts(x, routing, layer)
            finally:
                mlps.tiles_for, grouped._LEFT = chosen, least

        return run

    # Are they right

    def expected(self, x, routing, mlps):
        """In float32, expert by expert."""
        torch = self.torch
        out = torch.zeros(x.shape, device=DEVICE)
        quantised = self.model.kind == "fp8" and len(x) > 2  # tokens, as weights are
        for expert in routing.experts.unique().tolist():
            if not 0 <= expert < mlps.count:
                continue
            token, choice = (routing.experts == expert).nonzero(as_tuple=True)
            both = self.multiplied(x[token], mlps.gate_up, expert, quantised)
            hidden = self.joined(*both.to(x.dtype).float().chunk(2, 1)).to(x.dtype)
            found = self.multiplied(hidden, mlps.down, expert, quantised).to(x.dtype).float()
            out.index_add_(0, token, found * routing.weights[token, choice].float()[:, None])
        return out

    def joined(self, gate, up):
        if self.model.kind != "mxfp4":
            return self.torch.nn.functional.silu(gate).to(self.dtype).float() * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * (gate * 1.702).sigmoid() * (up + 1.0)

    def multiplied(self, x, matrices, expert: int, quantised: bool):
        from quire.kernels.codes import CodeFormat, quantise

        if quantised:
            x = quantise(x, CodeFormat(128)).dense()
        found = x.float() @ self.dense(matrices, expert, x.shape[1]).T
        return found if matrices.bias is None else found + matrices.bias[expert].float()

    def dense(self, matrices, expert: int, columns: int):
        from quire.kernels.dequantise import E2M1, unpack_nibbles
        from quire.kernels.four_bits import from_quarters

        torch = self.torch
        if matrices.dense is not None:
            return matrices.dense[expert].float()
        if self.model.kind == "fp8":
            codes, scales = matrices.packed
            rows = codes.shape[1] // 128
            its = scales.values[expert * rows : (expert + 1) * rows]
            its = its.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return codes[expert].float() * its
        codes, words = matrices.packed[:2]
        quarter = codes.shape[2]
        numbers = torch.tensor([*E2M1, *(-size for size in E2M1)], device=DEVICE)
        unpacked = unpack_nibbles(from_quarters(codes[expert], 4 * quarter, False).contiguous())
        exponents = torch.stack([(words[expert] >> (8 * i)) & 255 for i in range(4)], -1)
        of_row = exponents.permute(1, 2, 0).flatten(1)  # row, quarter, group
        scales = torch.exp2(of_row.float() - 127).repeat_interleave(32, 1)
        return (numbers[unpacked.long()] * scales)[:, :columns]

    def check(self, tokens: int) -> list[str]:
        """The names of what is wrong. One expert has more than a block, and one token none."""
        torch = self.torch
        x, routing = self.inputs(tokens)
        routing.experts[: max(1, tokens * 2 // 3), 0] = 1
        if tokens > 2:
            routing.experts[tokens // 2] = -1
        routing.experts[:, 1:][routing.experts[:, 1:] == 1] = 2
        layer, wrong = self.layers[0], []
        right = self.expected(x, routing, layer)
        # Kernels differ in the order of sums alone; where that changes a code, by more.
        most = 0.03 if self.model.kind == "fp8" else 0.01
        for name, kernel in self.variants(tokens).items():
            with self.watchdog.over(f"{name}, {tokens} tokens"):
                found = kernel(x, routing, layer).float()
                torch.cuda.synchronize()
            error = ((found - right).norm() / right.norm()).item()
            if not error < most:
                wrong.append(name)
                print(f"  WRONG: {name}, {tokens} tokens: off by {error:.2e}", flush=True)
        return wrong

    # How long they take

    def graph(self, kernel: Callable, tokens: int, name: str):
        torch = self.torch
        inputs = [self.inputs(tokens) for _ in self.layers]

        def call() -> None:
            for (x, routing), layer in zip(inputs, self.layers, strict=True):
                kernel(x, routing, layer)

        with self.watchdog.over(f"{name}, {tokens} tokens, warming up"):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                call()
            aside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph, inputs

    def seconds(self, tokens: int, skipped: list[str]) -> dict[str, float]:
        """Of one layer, by variant; they take turns."""
        torch = self.torch
        graphs = {
            name: self.graph(kernel, tokens, name)
            for name, kernel in self.variants(tokens).items()
            if name not in skipped
        }
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, (graph, _) in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with self.watchdog.over(f"{name}, {tokens} tokens, timed"):
                    graph.replay()
                    start.record()
                    for _ in range(REPLAYS):
                        graph.replay()
                    end.record()
                    end.synchronize()
                each = start.elapsed_time(end) / 1e3 / REPLAYS / len(self.layers)
                times[name].append(each)
        return {name: median(found) for name, found in times.items()}

    def limit(self, tokens: int) -> float:
        model = self.model
        weights = 3 * model.hidden * model.features
        size = {"mxfp4": 17 / 32, "bf16": 2, "fp8": 1}[model.kind]
        missed = (1 - model.top_k / model.experts) ** tokens
        read = weights * size * model.experts * (1 - missed)
        rate = MATRIX * (2 if model.kind == "fp8" else 1)
        return max(read / COPY, 2 * tokens * model.top_k * weights / rate)


def _unused(expert, x):
    raise AssertionError("kernels multiply")


def compile_part(name: str, part: int) -> None:
    """Run every `COMPILERS`th variant once: Triton keeps what it compiled."""
    lab = Lab(MODELS[name], 1)
    names = sorted({which for tokens in TOKENS for which in lab.variants(tokens)})[part::COMPILERS]
    tasks = [(tokens, which) for which in names for tokens in TOKENS]
    for tokens, which in tasks:
        if which not in lab.variants(tokens):
            continue
        x, routing = lab.inputs(tokens)
        started = time.monotonic()
        # Compiling takes no time of the GPU, and is not guarded: only the wait is.
        lab.variants(tokens)[which](x, routing, lab.layers[0])
        with lab.watchdog.over(f"{which}, {tokens} tokens"):
            lab.torch.cuda.synchronize()
        print(f"  compiled {which}, {tokens}: {time.monotonic() - started:.1f} s", flush=True)


def measure(name: str, out: Path | None) -> None:
    lab = Lab(MODELS[name], LAYERS)
    print(f"{name}: {MODELS[name]}", flush=True)
    wrong: list[str] = []
    for tokens in (1, 2, 16, 100, 300):
        wrong += lab.check(tokens)
    print(f"  right but for {sorted(set(wrong))}" if wrong else "  all are right", flush=True)
    figures = {}
    for tokens in TOKENS:
        found = lab.seconds(tokens, wrong)
        if not found:
            continue
        limit = lab.limit(tokens)
        best = min(found, key=found.__getitem__)
        says = ", ".join(
            f"{which} {1e6 * s:.1f}{' *' if which == best else ''}" for which, s in found.items()
        )
        share = 100 * limit / found[best]
        print(
            f"  {tokens:5} tokens, limit {1e6 * limit:7.1f} µs ({share:3.0f} %): {says}", flush=True
        )
        figures[tokens] = {"limit": limit, **found}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(figures, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root / "src"))
    if args.compile:
        compile_part(args.compile, args.part)
        return 0
    if args.measure:
        measure(args.measure, args.out)
        return 0
    names = args.only or list(MODELS)
    started = time.monotonic()
    me = [sys.executable, str(Path(__file__).resolve())]
    makers = {
        (name, part): subprocess.Popen(
            [*me, "--compile", name, "--part", str(part)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
        for part in range(COMPILERS)
    }
    until = time.monotonic() + GROUP_LIMIT
    for (name, part), process in makers.items():
        try:
            says, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            says, _ = process.communicate()
            says += "  ended: it took too long\n"
        if process.returncode:
            print(f"{name}, compiling, part {part}:\n{says[-1500:]}", flush=True)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    status = 0
    for name in names:
        command = [*me, "--measure", name]
        if args.out is not None:
            command += ["--out", str(args.out)]
        try:
            status |= subprocess.run(command, timeout=GROUP_LIMIT).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: ended, it took longer than {GROUP_LIMIT:.0f} s", flush=True)
            status = 1
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
