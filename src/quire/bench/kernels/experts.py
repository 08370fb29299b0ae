"""`quire bench experts`: the experts of one layer alone, in each format that kernels know."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.bench.options import add_run_flags, count, counts
from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish
from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.bench.kernels.expert_layers import Layers
    from quire.bench.report.machine_rates import Rates

GPU_TOKENS, CPU_TOKENS = [1, 16, 256, 8192], [1, 16, 64]
# Of Qwen3-30B-A3B; and of few small ones for a CPU.
GPU_SHAPE = {"experts": 128, "top_k": 8, "hidden": 2048, "features": 768}
CPU_SHAPE = {"experts": 8, "top_k": 2, "hidden": 256, "features": 128}

EXAMPLES = """examples:
  quire bench experts
  quire bench experts --experts 32 --top-k 4 --hidden 2880 --features 2880 --tokens 1,64,1024
  quire bench experts --device cpu

Tokens choose their experts at random. The limit is the longer of reading the weights of the chosen
experts once at the copy rate and of the products at the matrix rate, which for fp8 counts twice.
Several layers with choices of their own take turns, so that what is read is not in the chip's own
cache.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    says = {
        "experts": "of a layer",
        "top-k": "experts that a token goes through",
        "hidden": "size of what a token is",
        "features": "of an expert",
    }
    for name, what in says.items():
        default = GPU_SHAPE[name.replace("-", "_")]
        text = f"{what} (default: {default:,}; fewer on a CPU)"
        parser.add_argument(f"--{name}", type=count, metavar="N", help=text)
    parser.add_argument(
        "--tokens",
        type=counts,
        metavar="N,N,…",
        help=f"of a step (default: {', '.join(f'{n:,}' for n in GPU_TOKENS)}; fewer on a CPU)",
    )
    add_run_flags(parser, repeat=3)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)

    from quire.bench.engine.session import where
    from quire.bench.kernels.expert_layers import FORMATS, Layers, Shape
    from quire.bench.report.machine_rates import measured_rates
    from quire.runner.device import choose_device, choose_dtype

    config = EngineConfig.create(**settings)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, None, device)
    rates = measured_rates(device, dtype)
    on_gpu = device.type == "cuda"
    sizes = GPU_SHAPE if on_gpu else CPU_SHAPE
    shape = Shape(**{name: getattr(args, name) or size for name, size in sizes.items()})
    tokens = args.tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    rows: list[Row] = []
    with runs_bar("experts", len(FORMATS) * len(tokens) * args.repeat) as bar:
        for name, kind in FORMATS.items():
            layers = Layers(shape, kind, dtype, device)
            for number in tokens:
                runs = []
                for _ in range(args.repeat):
                    runs.append(layers.seconds(number))
                    bar.update()
                rows.append(_row(name, number, Sample(runs), layers, rates))
            del layers
    result = {"says": f"experts: {shape}", "rows": rows, "notes": []}
    publish({"benchmark": "experts", **result, **where(device, dtype, rates)}, args.json)
    return 0


def _row(name: str, tokens: int, seconds: Sample, layers: Layers, rates: Rates) -> Row:
    read, operations = layers.bytes_read(tokens), layers.operations(tokens)
    by_copy, by_matrix = read / rates.copy, operations / (rates.matrix * layers.matrix_speed)
    return {
        "weights": name,
        "tokens": tokens,
        "µs": seconds.map(lambda each: 1e6 * each),
        "GB/s": read / seconds.median / 1e9,
        "GFLOP/s": operations / seconds.median / 1e9,
        "bound by": "copies" if by_copy > by_matrix else "products",
        "% of limit": 100 * max(by_copy, by_matrix) / seconds.median,
    }
