"""Latent attention on an H200: main's kernels beside variants. `sh run.sh`; under 45 s.

Each variant is first checked in a process of its own against float32; one that hangs is killed and
not timed. Then one process times those that are left, in turns, by graphs of four layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "src"))
NEW: dict = {}
# arguments of attend (None: main's), which combine, and whether partial sums have 16 bits
VARIANTS: dict = {
    "main": (None, "main", False),
    "new": ({}, "new", False),
    "new, main's combine": ({}, "main", False),
}
TIMED_ONLY = {"main, no combine": (None, "none", False), "new, no combine": ({}, "none", False)}
CASES = [
    (128, 64, 4096),
    (128, 8, 16384),
    (64, 64, 4096),
    (16, 64, 4096),
    (16, 8, 16384),
    (128, 64, 2048),
]
FEW = ["main", "new", "new, main's combine"]
RANK, ROPE, BLOCK_SIZE, LAYERS = 512, 64, 16, 4
ROUNDS, REPLAYS = 11, 4
SECONDS_TO_BUILD, SECONDS_TO_RUN, SECONDS_IN_ALL = 40, 10, 70


def main() -> int:
    started = time.monotonic()
    timing = Watched(["--time"])
    checks = {name: Watched(["--check", name]) for name in VARIANTS}
    right = [name for name, process in checks.items() if process.ends_well(started)]
    print(f"right: {right} after {time.monotonic() - started:.0f} s", flush=True)
    timing.go(json.dumps(right))
    ended_well = timing.ends_well(started)
    print(f"all of it took {time.monotonic() - started:.0f} s")
    return 0 if ended_well and len(right) == len(VARIANTS) else 1


class Watched:
    """A process of this script. It says `begin` before it launches kernels and `end` after they
    have ended; one that says nothing for too long between these is killed."""

    def __init__(self, args: list[str]) -> None:
        self._name = args[-1]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._deadline = time.monotonic() + SECONDS_IN_ALL
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout:
            is_running = line.strip() == "begin"
            self._deadline = time.monotonic() + (SECONDS_TO_RUN if is_running else SECONDS_TO_BUILD)
            if line.strip() not in ("begin", "end"):
                print(line, end="", flush=True)

    def ends_well(self, started: float) -> bool:
        while self._process.poll() is None:
            now = time.monotonic()
            if now > self._deadline or now > started + SECONDS_IN_ALL:
                print(f"KILLED, it hangs: {self._name}", flush=True)
                self._process.kill()
                self._process.wait()
            time.sleep(0.02)
        self._thread.join()
        return self._process.returncode == 0


CHOSEN: dict = {}


def choose(variant: str) -> None:
    """Let `decode_latents` take this variant from now on."""
    from quire.kernels.triton.attention import combine, main_combine
    from quire.kernels.triton.latent import (
        choice,
        decode,
        hopper_few,
        hopper_pairs,
        main_few,
        main_pairs,
    )

    if not CHOSEN:
        CHOSEN.update(pairs=hopper_pairs.attend, few=hopper_few.attend)
    arguments, which, halves = {**VARIANTS, **TIMED_ONLY}[variant]
    choice.has_hopper_kernel = lambda *_: True  # which launches one to find out, unwatched
    CHOSEN["halves"] = halves
    if arguments is None:
        hopper_pairs.attend = main_pairs.attend
        hopper_few.attend = main_few.attend
    else:
        hopper_pairs.attend = partial(CHOSEN["pairs"], **arguments)
        hopper_few.attend = CHOSEN["few"]

    def old(*args, trigger=False):  # noqa: ANN001
        main_combine.combine_splits(*args)

    decode.combine_splits = {
        "main": old,
        "new": combine.combine_splits,
        "none": lambda *_, **__: None,
    }[which]


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
        import torch

        from quire.kernels.triton.latent.decode import decode_latents, split_latents

        splits = split_latents(self.batch, self.q, self.layers[0], 1)
        if CHOSEN["halves"]:
            splits = replace(splits, values=splits.values.new_empty(splits.values.shape, dtype=torch.bfloat16))
        for pages in self.layers:
            decode_latents(self.q, pages, self.batch, splits, self.scale, self.out)

    def expected(self):  # noqa: ANN201
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
    """Of many lengths, ten times each: an error that comes and goes is a race."""
    import torch

    torch.manual_seed(0)
    choose(variant)
    found = {}
    lengths = [1, 63, 64, 65, 127, 128, 129, 192, 1000, 5000, 4096, 777]
    shapes = [(128, 16), (64, 16)] + [(16, 16)] * (variant in FEW) + [(128, 24)] * (variant == "new")
    for heads, block_size in shapes:
        for scale in (1.0, 8.0) if variant == "new" else (1.0,):
            case = Case(heads, lengths, 2, block_size)
            case.q *= scale  # tops that rise far
            expected = case.expected()
            build(case)
            worst = 0.0
            for _ in range(10):
                case.out.fill_(torch.nan)
                print("begin")
                case.attend()
                torch.cuda.synchronize()
                print("end")
                error = float((case.out.float() - expected).norm() / expected.norm())
                most = float((case.out.float() - expected).abs().max())
                worst = max(worst, error)
                if not (error < 5e-3 * scale and most < 3e-2 * scale):
                    print(f"WRONG: {variant}, {heads} heads, blocks of {block_size}, {scale}: {error}, {most}")
                    return 1
            found[f"{heads}/{block_size}/{scale:.0f}"] = f"{worst:.1e}"
    print(f"{variant}: relative error {found}")
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


def time_all() -> int:
    import torch

    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    from quire.kernels.triton.latent import decode  # noqa: F401

    variants = json.loads(sys.stdin.readline())
    print("begin")
    matrix, copy = matrix_rate(), copy_rate()
    print("end")
    print(f"matrix rate {matrix / 1e12:.0f} TFLOP/s, copy rate {copy / 1e12:.2f} TB/s")
    for heads, sequences, tokens in CASES:
        case = Case(heads, [tokens] * sequences, LAYERS, BLOCK_SIZE)
        names = [name for name in (variants if heads > 32 else FEW) if name in variants]
        names += [name for name in TIMED_ONLY if name.split(",")[0] in variants]
        if tokens == 2048:
            names = [name for name in names if name in ("main", "new")]
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
            print(
                f"{heads:4} heads {sequences:2}x{tokens:<6} {name:22} {took * 1e6:7.1f} us "
                f"(least {min(times[name]) * 1e6:.1f})  {operations / took / matrix:6.1%} of matrix"
                f"  {size / took / copy:6.1%} of copy"
            )
        del graphs, case
        torch.cuda.empty_cache()
    return 0


def captured(call):  # noqa: ANN001, ANN201
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def seconds(call, repeat: int) -> float:  # noqa: ANN001
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
    if sys.argv[1:2] == ["--check"]:
        sys.exit(check(sys.argv[2]))
    sys.exit(time_all() if sys.argv[1:2] == ["--time"] else main())
