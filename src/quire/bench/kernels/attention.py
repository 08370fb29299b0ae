"""`quire bench attention`: the backend's attention alone, over blocks scattered in a large pool."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.bench.kernels.attention_case import Case, Heads, read_case
from quire.bench.options import add_run_flags, checked, count
from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish
from quire.config import EngineConfig, parse_size
from quire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from quire.bench.kernels.attention_pool import Pool
    from quire.bench.report.machine_rates import Rates

GPU_CASES = {
    "decode": ["64x4096", "256x800", "154x620-1544", "8x8192", "1x32768"],
    "prefill": ["16x1024", "1x8192", "1x32768", "1x2048+30720"],
}
CPU_CASES = {
    "decode": ["16x256", "32x50", "32x20-200", "4x512", "1x2048"],
    "prefill": ["4x64", "1x512", "1x128+896"],
}
GPU_POOL, CPU_POOL = 60 * 10**9, 256 << 20
GPU_LAYERS, CPU_LAYERS = 36, 4

CASE = (
    "SEQUENCESxTOKENS such as 64x4096, or with more tokens in the cache 1x2048+30720, "
    "or decodes of different lengths 154x620-1544"
)

EXAMPLES = """examples:
  quire bench attention
  quire bench attention --decode 8x8192 --decode 1x32768 --repeat 5
  quire bench attention --prefill 1x2048+30720 --profile attention.json
  quire bench attention --decode 256x4096 --heads 64 --head-dim 64 --window 128 --sinks
  quire bench attention --latent --heads 128 --decode 64x4096 --decode 8x16384
  quire bench attention --device cpu --pool 512MiB --kv-heads 3 --heads 9 --head-dim 64

A decode of 64x4096 is one new token for each of 64 sequences of 4,096 tokens, one of 154x620-1544
for sequences of 620 to 1,544 tokens, spread evenly and in no order; a prefill of
1x2048+30720 is 2,048 new tokens behind 30,720 cached ones. The limit is the longer of reading K and
V once at the copy rate and of the products at the matrix rate; a GPU's rates are measured again
before each run. The layers of the pool take turns, so that what is read is not in the chip's own
cache.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    for kind in ("decode", "prefill"):
        parser.add_argument(
            f"--{kind}",
            action="append",
            type=checked(partial(read_case, kind), CASE),
            metavar="CASE",
            help=f"a {kind} to time; give it again for more (default: "
            f"{', '.join(GPU_CASES[kind])}; smaller ones on a CPU)",
        )
    for name, value in (("heads", Heads.query), ("kv-heads", Heads.kv), ("head-dim", Heads.dim)):
        text = f"default: {value}"
        parser.add_argument(f"--{name}", type=count, default=value, metavar="N", help=text)
    parser.add_argument(
        "--window", type=count, metavar="N", help="positions a token sees (default: all before it)"
    )
    parser.add_argument(
        "--sinks", action="store_true", help="each query head has a learned sink, as in gpt-oss"
    )
    parser.add_argument(
        "--latent",
        action="store_true",
        help="decodes over latents of 512 + 64 numbers, as in DeepSeek; of the sizes of heads only "
        "--heads counts",
    )
    layers = f"layers of the pool (default: {GPU_LAYERS} on a GPU, {CPU_LAYERS} on a CPU)"
    parser.add_argument("--layers", type=count, metavar="N", help=layers)
    parser.add_argument(
        "--pool",
        type=checked(parse_size, "a size in bytes such as 8GiB"),
        metavar="SIZE",
        help="bytes of the block pool (default: 60GB on a GPU, 256MiB on a CPU)",
    )
    add_run_flags(parser, repeat=3, profile="one round of each")


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    heads = Heads(args.heads, args.kv_heads, args.head_dim)
    if args.latent:
        heads = Heads.of_deepseek(args.heads)
        if args.prefill or args.window or args.sinks:
            raise ConfigError("--latent is timed in decodes alone: leave out the other options.")

    from quire.bench.engine.session import where
    from quire.bench.kernels.attention_pool import Pool, free_bytes
    from quire.bench.report.machine_rates import measured_rates, rates_now
    from quire.bench.report.profile import trace_path
    from quire.runner.device import choose_device, choose_dtype

    trace = trace_path(args.profile, "attention")
    config = EngineConfig.create(**settings)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, None, device)
    rates = measured_rates(device, dtype)
    on_gpu = device.type == "cuda"
    cases = _cases(args, GPU_CASES if on_gpu else CPU_CASES)
    cases = [case for case in cases if case.kind == "decode" or not args.latent]
    pool = Pool(
        heads,
        layers=args.layers or (GPU_LAYERS if on_gpu else CPU_LAYERS),
        block_size=config.block_size,
        size=args.pool or (min(GPU_POOL, free_bytes(device) * 7 // 10) if on_gpu else CPU_POOL),
        device=device,
        dtype=dtype,
        window=args.window,
        sinks=args.sinks,
    )
    for case in cases:
        pool.check_room(case)
    again = partial(rates_now, device, dtype) if on_gpu else lambda: rates
    result = measure(pool, cases, again, args.repeat) | where(device, dtype, rates)
    if trace is not None:
        result["profile"] = _profile(pool, cases, device, trace)
    publish({"benchmark": "attention", **result}, args.json)
    return 0


def measure(
    pool: Pool, cases: list[Case], rates: Callable[[], Rates], repeat: int
) -> dict[str, Any]:
    """Runs and the machine's own `rates` in turns."""
    with runs_bar("attention", len(cases) * repeat) as bar:
        rows = []
        for case in cases:
            runs = []
            for _ in range(repeat):
                runs.append((rates(), pool.seconds(case)))
                bar.update()
            rows.append(_row(case, runs, pool))
    return {"says": f"attention: {pool.says}", "rows": rows, "notes": []}


def _cases(args: argparse.Namespace, defaults: dict[str, list[str]]) -> list[Case]:
    """What was asked for, or all of the defaults."""
    asked = [*(args.decode or []), *(args.prefill or [])]
    return asked or [read_case(kind, text) for kind, texts in defaults.items() for text in texts]


def _row(case: Case, runs: list[tuple[Rates, float]], pool: Pool) -> Row:
    window = pool.scoring.window
    read = case.kv_bytes(pool.heads, pool.dtype.itemsize, window, pool.layout.block_size)
    operations = case.operations(pool.heads, window)
    unit, size = ("TFLOP/s", 1e12) if pool.device.type == "cuda" else ("GFLOP/s", 1e9)
    seconds = Sample(each for _, each in runs)
    limits = Sample(max(read / rates.copy, operations / rates.matrix) for rates, _ in runs)
    shares = zip(limits.runs, seconds.runs, strict=True)
    return {
        "case": str(case),
        "µs": seconds.map(lambda each: 1e6 * each),
        "GB/s": read / seconds.median / 1e9,
        unit: operations / seconds.median / size,
        "limit": 1e6 * limits.median,
        "% of limit": Sample(100 * limit / each for limit, each in shares),
    }


def _profile(pool: Pool, cases: list[Case], device: torch.device, path: Path) -> dict[str, Any]:
    from quire.bench.report.profile import described, record

    rounds = [pool.prepared(case) for case in cases]

    def run_all() -> None:
        for each in rounds:
            each()

    calls = sum(pool.layers_of(case) for case in cases)
    return described(record(run_all, run_all, device, path), "calls", calls, path)
