"""One stream on an H200, two source trees (or more) side by side: `quire bench latency`, in turns.

    python bench_lab/stream.py TREE OTHER_TREE [--models gpt-oss-20b,…] [--rounds 2] [--layers 12]

A tree is a checkout of Quire. Each run is a process of its own with that tree's `src`, whole models
with dummy weights, one sequence at a time (few graphs are recorded, so that a process lives for
seconds). The trees take turns within a model, and the order turns around from round to round. With
`--layers` models are cut to so many, which is faster to open and, with fewer than about 20, bound
by the host: only differences of products then show, and not all of them.

    python bench_lab/stream.py TREE --sweep

measures the two products of gpt-oss-20b's experts alone, for one token, with programs of several
shapes: what `few_fours.py` is launched with (`tiles.json`, "few", "four bits"), half a minute.

One process at a time is compiled for: run it once with `--rounds 1 --warm-up` if Triton's cache is
empty, which compiles each tree's kernels and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    model: str
    flags: tuple[str, ...]
    layers: int
    before: float  # ms a token that docs/benchmarks.md has
    wanted: float


CASES = {
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", (), 48, 2.56, 2.4),
    "qwen3-30b-a3b-fp8": Case("qwen3-30b-a3b", ("--quantization", "fp8"), 48, 1.83, 1.8),
    "deepseek-v2-lite": Case("deepseek-v2-lite", (), 27, 2.24, 2.0),
    "gpt-oss-20b": Case("gpt-oss-20b", (), 24, 1.87, 1.45),
    "qwen3-8b-fp8": Case("qwen3-8b", ("--quantization", "fp8"), 36, 2.58, 2.45),
}
DEFAULT = ",".join(CASES)
CASES["qwen3-0.6b"] = Case("qwen3-0.6b", (), 28, float("nan"), float("nan"))
SMALL = ("--max-num-seqs", "1", "--max-model-len", "2048", "--load-format", "dummy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--models", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5, help="runs of 256 tokens in a process")
    parser.add_argument("--layers", type=int, help="cut models to so many layers")
    parser.add_argument("--warm-up", action="store_true", help="only compile")
    parser.add_argument("--sweep", action="store_true", help="shapes of MXFP4's programs")
    parser.add_argument("--run", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sweep:
        sys.path.insert(0, str(args.trees[0].resolve() / "src"))
        sweep()
    elif args.run:
        measure(args.trees[0], CASES[args.run], args.layers, args.repeat, args.json)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    found: dict[tuple[str, Path], list[float]] = {}
    for name in args.models.split(","):
        for number in range(args.rounds):
            for tree in args.trees if number % 2 == 0 else args.trees[::-1]:
                started = time.time()
                ms = in_process(args, name, tree)
                took = time.time() - started
                print(f"{name:20s} {tree!s:32s} {ms:7.3f} ms a token ({took:.0f} s)", flush=True)
                found.setdefault((name, tree), []).append(ms)
    if args.warm_up:
        return
    first = args.trees[0]
    print(
        f"\n{'':20s} {'docs':>6s} {'wanted':>6s} " + " ".join(f"{t.name:>12s}" for t in args.trees)
    )
    for name in args.models.split(","):
        case = CASES[name]
        layers = args.layers or case.layers
        medians = [statistics.median(found[name, tree]) for tree in args.trees]
        line = " ".join(f"{ms:12.3f}" for ms in medians)
        saved = " ".join(f"{1e3 * (medians[0] - ms) / layers:+.2f}" for ms in medians[1:])
        print(
            f"{name:20s} {case.before:6.2f} {case.wanted:6.2f} {line}   saved a layer, µs: {saved}"
        )
    print(f"(against {first}; medians of {args.rounds})")


def in_process(args: argparse.Namespace, name: str, tree: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, __file__, str(tree), "--run", name, "--json", str(path)]
        command += ["--repeat", "1" if args.warm_up else str(args.repeat)]
        command += ["--layers", str(args.layers)] if args.layers else []
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not path.exists():
            print(done.stdout[-1500:], done.stderr[-3000:], sep="\n")
            return float("nan")
        [row] = json.loads(path.read_text())["rows"]
    return median(row["ms per token"])


def median(figure: Any) -> float:
    """Of a sample as a benchmark's JSON has it."""
    if isinstance(figure, dict):
        return float(figure["median"])
    return float(statistics.median(figure) if isinstance(figure, list) else figure)


def measure(tree: Path, case: Case, layers: int | None, repeat: int, path: str) -> None:
    import quire
    from quire.models.checkpoints import dummy

    assert Path(quire.__file__).is_relative_to(tree.resolve()), quire.__file__
    if layers:
        dummy.SHAPES[case.model]["num_hidden_layers"] = layers
    from quire.api.cli import main as command

    words = ["bench", "latency", case.model, *SMALL, *case.flags]
    words += ["--workload", "stream1", "--repeat", str(repeat), "--json", path]
    sys.exit(command(words))


def sweep() -> None:
    import torch

    from quire.bench.kernels.expert_layers import FORMATS, Layers, Shape
    from quire.kernels.triton.experts import few_fours, mlps
    from quire.kernels.triton.experts.tiles import FewShape

    layers = Layers(
        Shape(32, 4, 2880, 2880), FORMATS["MXFP4"], torch.bfloat16, torch.device("cuda")
    )
    usual = FewShape(16, 128, 4), FewShape(4, 128, 4)
    firsts = [FewShape(together, 32 * w, w) for together, w in ((8, 4), (32, 4), (16, 2), (16, 8))]
    seconds = [FewShape(together, 32 * w, w) for together, w in ((8, 4), (4, 2), (8, 2), (4, 8))]
    pairs = [usual, *((each, usual[1]) for each in firsts), *((usual[0], each) for each in seconds)]
    for stages in (3, 4):
        few_fours._STAGES = stages
        for first, second in pairs if stages == 3 else [usual]:
            mlps.few_shapes = lambda *_, both=(first, second): both
            took = 1e6 * layers.seconds(1)
            print(f"stages {stages}, {tuple(first)} and {tuple(second)}: {took:.1f} µs", flush=True)


if __name__ == "__main__":
    main()
