"""`quire bench adapters`: what LoRA adapters cost, on the same engine in turns with none."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.engine import workloads
from quire.bench.engine.latency import STREAM_IN, STREAM_OUT
from quire.bench.engine.workloads import answers, random_prompt, workload
from quire.bench.options import add_run_flags, count, listed
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import Row, check_json_path, publish

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.beam_params import BeamSearchParams
    from quire.lora_request import LoRARequest
    from quire.params import SamplingParams

    Speed = Callable[[LLM, int, list[LoRARequest] | None], float]

PROMPT = 8192
SAYS = {
    "nano": workloads.SAYS["nano"],
    "cpu": workloads.SAYS["cpu"],
    "stream1": f"1 request, {STREAM_IN} in, {STREAM_OUT} out: tokens after the first",
    "prompt": f"1 request of {PROMPT:,} tokens, 1 out: tokens of the prompt",
}
EXAMPLES = f"""examples:
  quire bench adapters --workload cpu --adapters 4
  quire bench adapters qwen3-8b --load-format dummy --workload nano stream1 prompt
  quire bench adapters qwen3-8b --load-format dummy --workload nano --adapters 64 --max-loras 8

workloads:
{listed(SAYS)}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload", nargs="+", choices=SAYS, default=["cpu"], help="which requests (default: cpu)"
    )
    parser.add_argument(
        "--adapters",
        type=count,
        default=8,
        metavar="N",
        help="adapters of random numbers, which the requests take in turn (default: 8)",
    )
    parser.add_argument(
        "--rank", type=count, default=16, metavar="N", help="of each adapter (default: 16)"
    )
    add_run_flags(parser, repeat=3)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    announce_model(settings)

    from quire.bench.engine.dummy_adapters import write_adapters
    from quire.bench.engine.session import open_session

    slots = settings.get("max_loras", args.adapters)
    settings = {
        "max_model_len": PROMPT + 1 if "prompt" in args.workload else 4096,
        "max_lora_rank": max(16, args.rank),
        "max_cpu_loras": max(slots, args.adapters),
        **settings,
        "max_loras": slots,
        "enable_lora": True,
    }
    with open_session(settings) as session, tempfile.TemporaryDirectory() as folder:
        model, dtype = session.source.config, session.dtype
        with runs_bar("adapters written", args.adapters, "adapter") as bar:
            adapters = []
            for each in write_adapters(Path(folder), model, args.adapters, args.rank, dtype):
                adapters.append(each)
                bar.update()
        _read(session.llm, adapters)
        rows = [_row(session.llm, name, adapters, args.repeat) for name in args.workload]
        says = f"{args.adapters} adapters of rank {args.rank} in {slots} slots"
        result = session.report(", ".join(args.workload), says)
    publish({"benchmark": "adapters", **result, "rows": rows, "notes": []}, args.json)
    return 0


def _read(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Into host memory, which takes longer than the warm-up that would else wait for it."""
    catalog = llm.engine.adapters
    assert catalog is not None
    with runs_bar("adapters read", len(adapters), "adapter") as bar:
        for source in [catalog.find(each) for each in adapters]:
            source.check()
            bar.update()


def _row(llm: LLM, name: str, adapters: list[LoRARequest], repeat: int) -> Row:
    """With and without adapters in turns; the ratio is taken within each turn."""
    speed = {"stream1": _stream_speed, "prompt": _prompt_speed}.get(name) or _batch_speed(name)
    plain: list[float] = []
    adapted: list[float] = []
    with runs_bar(f"{name}, the first two to warm up", 2 + 2 * repeat) as bar:
        for seed in range(repeat + 1):
            plain.append(speed(llm, seed, None))
            bar.update()
            adapted.append(speed(llm, seed, adapters))
            bar.update()
    pairs = list(zip(plain, adapted, strict=True))[1:]
    return {
        "workload": name,
        "tok/s without": Sample(without for without, _ in pairs),
        "tok/s with": Sample(with_them for _, with_them in pairs),
        "with / without": Sample(with_them / without for without, with_them in pairs),
    }


def _batch_speed(name: str) -> Speed:
    """Tokens that come out, a second."""
    whole = workload(name)

    def speed(llm: LLM, seed: int, adapters: list[LoRARequest] | None) -> float:
        load = whole if seed else whole.warm_up()
        return load.output_tokens / _seconds(llm, load.prompts, load.params, adapters)

    return speed


def _stream_speed(llm: LLM, seed: int, adapters: list[LoRARequest] | None) -> float:
    """Tokens a second after the first."""
    prompts = [random_prompt(STREAM_IN, seed)]
    first, all_of_them = (
        _seconds(llm, prompts, answers([tokens]), adapters) for tokens in (1, STREAM_OUT)
    )
    return (STREAM_OUT - 1) / (all_of_them - first)


def _prompt_speed(llm: LLM, seed: int, adapters: list[LoRARequest] | None) -> float:
    """Tokens of a prompt, a second."""
    return PROMPT / _seconds(llm, [random_prompt(PROMPT, seed)], answers([1]), adapters)


def _seconds(
    llm: LLM,
    prompts: list[list[int]],
    params: Sequence[SamplingParams | BeamSearchParams],
    adapters: list[LoRARequest] | None,
) -> float:
    """From a cold cache, the adapters taken in turn."""
    from quire.bench.engine.timing import generate_seconds

    llm.reset_prefix_cache()
    chosen = adapters and [adapters[i % len(adapters)] for i in range(len(prompts))]
    return generate_seconds(llm, prompts, params, chosen)
