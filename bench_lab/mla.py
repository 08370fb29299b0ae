"""Latent attention's kernels for 128 heads on a Hopper GPU: are they right, which is the faster?

    python3 bench_lab/mla.py            # about a minute
    python3 bench_lab/mla.py --json results.json

First each variant answers in a process of its own, against a plain reference; one that hangs is
killed after 20 seconds, and one that hangs or errs is not timed. Then one process times those that
are left, in turns, over blocks that lie anywhere, with four layers in turn so that no cache holds
what is read. Shares are of the rates at which this run multiplies matrices and copies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median

VARIANTS = {  # arguments of `hopper_pairs.attend`; None is the kernel before it
    "tiles": None,
    "pairs": {"ahead": 0, "values_first": False},
    "pairs, L2": {"ahead": 1, "values_first": False},
    "pairs, values first": {"ahead": 0, "values_first": True},
    "pairs, values first, L2": {"ahead": 1, "values_first": True},
}
CASES = [(128, 64, 4096), (128, 8, 16384), (64, 64, 4096), (16, 64, 4096), (16, 8, 16384)]
RANK, ROPE, BLOCK_SIZE, LAYERS = 512, 64, 16, 4
ROUNDS, REPLAYS = 9, 3
SECONDS_TO_BUILD, SECONDS_TO_RUN = 150, 20
SOURCE = Path(__file__).resolve().parent.parent / "src"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where all numbers go")
    parser.add_argument("--check", metavar="VARIANT", help=argparse.SUPPRESS)
    parser.add_argument("--time", metavar="VARIANTS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(SOURCE))
    if args.check:
        return check(args.check)
    if args.time:
        return time_all(json.loads(args.time), args.json)

    started = time.monotonic()
    checks = {name: Watched(["--check", name]) for name in VARIANTS}
    right = [name for name, process in checks.items() if process.ends_well()]
    print(f"right: {right} after {time.monotonic() - started:.0f} s", flush=True)
    if not right:
        return 1
    more = ["--json", str(args.json)] if args.json else []
    timing = Watched(["--time", json.dumps(right), *more])
    ended_well = timing.ends_well()
    print(f"all of it took {time.monotonic() - started:.0f} s")
    return 0 if ended_well and len(right) == len(VARIANTS) else 1


class Watched:
    """A process of this script. It says `begin` before it launches kernels and `end` after they
    have ended; one that says nothing for too long between these is killed."""

    def __init__(self, args: list[str]) -> None:
        self._name = args[1]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *args],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._deadline = time.monotonic() + SECONDS_TO_BUILD
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            is_running = line.strip() == "begin"
            self._deadline = time.monotonic() + (SECONDS_TO_RUN if is_running else SECONDS_TO_BUILD)
            if line.strip() not in ("begin", "end"):
                print(line, end="", flush=True)

    def ends_well(self) -> bool:
        while self._process.poll() is None:
            if time.monotonic() > self._deadline:
                print(f"KILLED, it hangs: {self._name}", flush=True)
                self._process.kill()
                self._process.wait()
            time.sleep(0.1)
        self._thread.join()
        return self._process.returncode == 0


def choose(variant: str) -> None:
    """Let `decode_latents` take this variant from now on."""
    from quire.kernels.triton.latent import choice, hopper_pairs, shapes

    choice.has_hopper_kernel = lambda *_: True  # which launches one to find out, unwatched
    arguments = VARIANTS[variant]
    choice.MANY_ROWS = shapes.HOPPER if arguments is None else shapes.HOPPER_PAIRS
    if arguments is not None:
        plain = getattr(hopper_pairs.attend, "func", hopper_pairs.attend)
        hopper_pairs.attend = partial(plain, **arguments)


class Case:
    """A step of one new token for each sequence, and layers of a pool with what is before it."""

    def __init__(self, heads: int, lengths: list[int], layers: int, block_size: int) -> None:
        import torch

        from quire.kernels.batch import AttentionBatch
        from quire.kernels.pages import LatentPages

        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts)).split(counts)
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for table, blocks in zip(tables, order, strict=True):
            table[: len(blocks)] = blocks
        ends = list(range(len(lengths) + 1))
        self.batch = AttentionBatch(
            torch.zeros(len(lengths), dtype=torch.int64, device="cuda"),
            tables.cuda(),
            torch.tensor(ends, dtype=torch.int32, device="cuda"),
            torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            [1] * len(lengths),
            lengths,
        )
        half, width = torch.bfloat16, RANK + ROPE
        pool = torch.empty(sum(counts), layers, block_size, width, dtype=half, device="cuda")
        for part in pool.split(4096):
            part.normal_()
        self.layers = [LatentPages.of(pool[:, i], RANK) for i in range(layers)]
        self.q = torch.randn(len(lengths), heads, width, device="cuda").to(half)
        self.out = torch.full_like(self.q[..., :RANK], torch.nan).contiguous()
        self.scale = width**-0.5

    def attend(self) -> None:
        """All layers, as a step does."""
        from quire.kernels.triton.latent.decode import decode_latents, split_latents

        splits = split_latents(self.batch, self.q, self.layers[0], 1)
        for pages in self.layers:
            decode_latents(self.q, pages, self.batch, splits, self.scale, self.out)

    def expected(self) -> object:
        """The last layer's, in float32."""
        import torch

        values = self.layers[-1].values.float()
        rows = []
        for i, length in enumerate(self.batch.contexts):
            latents = values[self.batch.block_tables[i].long()].flatten(0, 1)[:length]
            weights = (self.q[i].float() @ latents.T * self.scale).softmax(-1)
            rows.append(weights @ latents[:, :RANK])
        return torch.stack(rows)


def check(variant: str) -> int:
    """Of many lengths, twenty times each: an error that comes and goes is a race."""
    import torch

    torch.manual_seed(0)
    choose(variant)
    worst = 0.0
    lengths = [1, 63, 64, 65, 127, 128, 129, 192, 1000, 5000, 4096, 777]
    for heads, block_size in ((128, 16), (64, 16), (128, 24)):
        case = Case(heads, lengths, 1, block_size)
        expected = case.expected()
        build(case)
        for _ in range(20):
            case.out.fill_(torch.nan)
            print("begin")
            case.attend()
            torch.cuda.synchronize()
            print("end")
            error = (case.out.float() - expected).norm() / expected.norm()
            most = (case.out.float() - expected).abs().max()
            worst = max(worst, float(error))
            if not (error < 5e-3 and most < 3e-2):
                print(f"WRONG: {variant}, {heads} heads, blocks of {block_size}: {error}, {most}")
                return 1
    print(f"{variant}: relative error {worst:.1e}")
    return 0


def build(case: Case) -> None:
    """Compile the kernels before the watchdog looks, by a case without sequences' tokens: its
    programs end at once."""
    import torch

    short = Case(case.q.shape[1], [1], 1, case.layers[0].block_size)
    short.batch.context_lens.zero_()
    short.batch.query_starts.zero_()
    short.attend()
    torch.cuda.synchronize()


def time_all(variants: list[str], path: Path | None) -> int:
    import torch

    torch.manual_seed(0)
    print("begin")
    matrix, copy = matrix_rate(), copy_rate()
    print("end")
    print(
        f"this run multiplies at {matrix / 1e12:.0f} TFLOP/s and copies at {copy / 1e12:.2f} TB/s"
    )
    results = []
    for heads, sequences, tokens in CASES:
        case = Case(heads, [tokens] * sequences, LAYERS, BLOCK_SIZE)
        names = variants if heads > 32 else variants[:1]
        graphs = {}
        for name in names:
            choose(name)
            build(case)
            print("begin")
            graphs[name] = captured(case.attend)
            print("end")
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                print("begin")
                times[name].append(seconds(graphs[name].replay, REPLAYS) / LAYERS)
                print("end")
        operations = 2 * heads * (2 * RANK + ROPE) * sequences * tokens
        size = sequences * tokens * (RANK + ROPE) * 2
        for name in names:
            took = median(times[name])
            found = {
                "heads": heads,
                "case": f"{sequences}x{tokens}",
                "variant": name,
                "us": took * 1e6,
                "least_us": min(times[name]) * 1e6,
                "tflops": operations / took / 1e12,
                "of_matrix": operations / took / matrix,
                "of_copy": size / took / copy,
            }
            results.append(found)
            print(
                f"{heads:4} heads {found['case']:>9}  {name:24} {found['us']:7.1f} us "
                f"(least {found['least_us']:.1f})  {found['tflops']:4.0f} TFLOP/s  "
                f"{found['of_matrix']:4.0%} of matrix  {found['of_copy']:4.0%} of copy"
            )
        del graphs, case
        torch.cuda.empty_cache()
    if path:
        path.write_text(json.dumps({"matrix": matrix, "copy": copy, "results": results}, indent=1))
    return 0


def captured(call):  # type: ignore[no-untyped-def]
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def seconds(call, repeat: int) -> float:  # type: ignore[no-untyped-def]
    import torch

    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


def matrix_rate() -> float:
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / median(seconds(lambda: torch.mm(a, b), 10) for _ in range(5))


def copy_rate() -> float:
    import torch

    a = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / median(seconds(lambda: b.copy_(a), 3) for _ in range(3))


if __name__ == "__main__":
    sys.exit(main())
