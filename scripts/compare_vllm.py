"""vLLM with Quire's connector, with its own offloading and with neither, side by side.

    python scripts/compare_vllm.py --time-limit 240
    python scripts/compare_vllm.py --model /models/qwen3-8b --load-format auto --one-at-a-time

The first command measures Qwen3-8B's shape with dummy weights on a GPU of 141 GB: each of the three
engines is a process, all start at once, and then take turns. A smaller GPU holds one at a time.

Measured are the time to the first token of a long prompt (cold; from vLLM's own prefix cache; from
host memory, after that cache was reset) and the throughput of a workload that no tier has seen.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.engine.workloads import LARGEST_ID, WORKLOADS, Workload, random_prompt
from quire.config import parse_size

PLAIN, QUIRE, OFFLOADING = "vLLM", "vLLM + Quire", "vLLM + its offloading"
COLD, GPU_HIT, HOST_HIT = "cold", "GPU hit", "host hit"
LAST_TOKENS = 64  # of a prompt may be computed again: the last block, which is never a hit
RESERVE_S = 10.0  # of the time limit, for ending processes and printing the table
START_SHARE = 0.6  # of the time limit: an engine that is not ready by then is left out
CLOSE_S = 2.0  # for a vLLM to end by itself

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
SHAPES = {
    "qwen3-0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}

# --- the child: one vLLM --------------------------------------------------------------------------


class Session:
    """A vLLM that does what the lines of standard input say."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(**settings)

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> dict[str, float]:
        """The seconds until all is answered, and how many tokens were found, and how many drawn."""
        params = [
            self._params(
                temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False
            )
            for length in lengths
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        answers = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "cached": sum(answer.num_cached_tokens or 0 for answer in answers),
            "tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
        }

    def forget(self) -> None:
        """Empty vLLM's own prefix cache.

        vLLM frees a block that was being saved in a later step, so this makes steps.
        """
        while True:
            self.generate([[1, 2, 3]], [1], 0.0)
            time.sleep(0.1)
            self.generate([[1, 2, 3]], [1], 0.0)
            if self._llm.reset_prefix_cache():
                return


def serve_session(answers: int, settings: str, limit_s: float) -> None:
    # A parent that was killed cannot end its processes.
    faulthandler.dump_traceback_later(limit_s + RESERVE_S, exit=True)
    session = Session(json.loads(settings))
    with os.fdopen(answers, "w", buffering=1) as out:
        print(json.dumps("ready"), file=out)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            print(json.dumps(getattr(session, what)(*arguments)), file=out)


# --- the parent -----------------------------------------------------------------------------------


class EngineError(Exception):
    """A vLLM ended, or did not answer in time."""


class Engine:
    """A vLLM in a process group of its own, and how it is asked."""

    def __init__(self, name: str, settings: dict[str, Any], folder: Path, deadline: float) -> None:
        self.name = name
        self._deadline = deadline
        self._log = folder / f"{file_name(name)}.log"
        self._started = time.monotonic()
        read, write = os.pipe()
        limit_s = max(1.0, deadline - self._started)
        caches = {"VLLM_CACHE_ROOT": str(folder / file_name(name))}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--serve",
                    str(write),
                    json.dumps(settings),
                    str(limit_s),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                text=True,
                start_new_session=True,
                env=caches | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def wait_until_ready(self, limit_s: float) -> float:
        """The seconds from the process's start."""
        self._answer(min(self._deadline, self._started + limit_s))
        return time.monotonic() - self._started

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps([what, *arguments]), file=self._process.stdin, flush=True)
        except OSError:
            raise self._ended() from None
        return self._answer(self._deadline)

    def _answer(self, deadline: float) -> Any:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._answers], [], [], left)[0]:
            raise EngineError("It did not answer in time.")
        line = self._answers.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> EngineError:
        tail = self._log.read_text(errors="replace")[-3000:]
        return EngineError(f"It ended; its log, {self._log}, says at last:\n{tail}")

    def end(self) -> None:
        """Let it end by itself: it reads no more lines."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        with contextlib.suppress(ProcessLookupError):  # what is left of its processes, too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()


def file_name(engine: str) -> str:
    return engine.replace(" + ", " ").replace(" ", "-")


class Comparison:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._started = time.monotonic()
        self._deadline = self._started + args.time_limit - RESERVE_S
        self._workload = WORKLOADS[args.workload]()
        self._seeds = range(1, args.rounds + 1)  # 0 is the workloads' own
        self._open: dict[str, Engine] = {}
        self.failed: set[str] = set()
        self.first_token: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.throughput: dict[str, list[float]] = defaultdict(list)

    def run(self) -> None:
        names = [name for name in (PLAIN, QUIRE, OFFLOADING) if name in self._args.engines]
        try:
            if not self._args.one_at_a_time:
                self._open_all(names)
            self._measure_first_tokens(names)
            self._measure_throughput([name for name in names if name != OFFLOADING])
        finally:
            for engine in self._open.values():
                engine.end()
            for engine in self._open.values():
                engine.close()

    # --- engines ----------------------------------------------------------------------------------

    def _open_all(self, names: list[str]) -> None:
        """All at once: most of a start is compiling on the CPU."""
        for name in names:
            self._open[name] = self._start(name)
        for name in names:
            with self._tolerated(name):
                self._make_ready(self._open[name])

    def _start(self, name: str) -> Engine:
        return Engine(name, engine_settings(name, self._args), self._folder, self._deadline)

    @contextlib.contextmanager
    def _engine(self, name: str) -> Iterator[Engine]:
        """The open one, or a fresh one."""
        if name in self._open:
            yield self._open[name]
            return
        engine = self._start(name)
        try:
            self._make_ready(engine)
            yield engine
        finally:
            engine.close()

    def _make_ready(self, engine: Engine) -> None:
        """Every path is taken once: kernels are compiled when they are first called."""
        seconds = engine.wait_until_ready(START_SHARE * self._args.time_limit)
        self._say(engine.name, f"ready after {seconds:.0f} s")
        self._first_tokens(engine, seed=self._args.rounds + 1)
        self._answer(engine, self._workload.warm_up(), turn=0)

    @contextlib.contextmanager
    def _tolerated(self, name: str) -> Iterator[None]:
        """An engine that fails is left out, and the others go on."""
        try:
            yield
        except EngineError as error:
            self.failed.add(name)
            self._say(name, str(error))

    # --- measurements -----------------------------------------------------------------------------

    def _measure_first_tokens(self, names: list[str]) -> None:
        if self._args.one_at_a_time:
            for name in names:
                with self._tolerated(name), self._engine(name) as engine:
                    for seed in self._seeds:
                        self._keep_first_tokens(engine, seed)
            return
        for seed in self._seeds:
            for name in names:
                if name not in self.failed:
                    with self._tolerated(name):
                        self._keep_first_tokens(self._open[name], seed)

    def _keep_first_tokens(self, engine: Engine, seed: int) -> None:
        times = self._first_tokens(engine, seed)
        for phase, ms in times.items():
            self.first_token[engine.name, phase].append(ms)
        shown = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in times.items())
        self._say(engine.name, f"{self._args.length:,} tokens: {shown}")

    def _first_tokens(self, engine: Engine, seed: int) -> dict[str, float]:
        """Milliseconds to the first token of a prompt that is new to the engine."""
        prompt = random_prompt(self._args.length, seed)
        times = {}
        for phase in [COLD, GPU_HIT] if engine.name == PLAIN else [COLD, GPU_HIT, HOST_HIT]:
            if phase == HOST_HIT:
                engine.ask("forget")
            answer = engine.ask("generate", [prompt], [1], 0.0)
            expected = 0 if phase == COLD else len(prompt)
            if abs(answer["cached"] - expected) <= LAST_TOKENS:
                times[phase] = 1000 * answer["seconds"]
            else:
                found = f"{answer['cached']:,} tokens were found"
                self._say(engine.name, f"no {phase}, which does not count: {found}")
        return times

    def _measure_throughput(self, names: list[str]) -> None:
        """In turns, each first in every second one; the tokens of every turn are new."""
        longest = 0.0
        for turn in range(1, self._args.turns + 1):
            for name in names if turn % 2 else reversed(names):
                left = self._deadline - time.monotonic()
                if name in self.failed or left < longest:
                    continue
                began = time.monotonic()
                with self._tolerated(name), self._engine(name) as engine:
                    engine.ask("forget")
                    rate = self._answer(engine, self._workload, turn)
                    self.throughput[name].append(rate)
                    self._say(name, f"{self._workload.name}: {rate:,.0f} tokens/s")
                longest = max(longest, time.monotonic() - began)

    def _answer(self, engine: Engine, workload: Workload, turn: int) -> float:
        """Output tokens a second."""
        shift = turn * (LARGEST_ID + 1)
        prompts = [
            [(token + shift) % self._args.vocabulary for token in prompt]
            for prompt in workload.prompts
        ]
        lengths = [out for _, out in workload.lengths]
        answer: dict[str, float] = engine.ask("generate", prompts, lengths, 0.6)
        return answer["tokens"] / answer["seconds"]

    def _say(self, name: str, what: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {name}: {what}", flush=True)


def engine_settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`."""
    longest = max(args.length, WORKLOADS[args.workload]().longest)
    # The third engine answers one prompt at a time, and needs little.
    kv_bytes = args.kv_bytes // 4 if name == OFFLOADING else args.kv_bytes
    settings = {
        "model": str(args.model),
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": longest + 16,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": 0.05,  # what has to be free at the start; engines start together
        **args.engine_args,
    }
    if name == QUIRE:
        named = {"model_name": args.model.name} if args.load_format == "dummy" else {}
        settings["kv_transfer_config"] = {
            "kv_connector": "QuireConnector",
            "kv_connector_module_path": "quire.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_cache_bytes": args.host_bytes,
                **named,
                **args.quire_config,
            },
        }
    if name == OFFLOADING:
        settings["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": args.host_bytes},
        }
    return settings


# --- the table ------------------------------------------------------------------------------------


def print_table(comparison: Comparison, args: argparse.Namespace) -> None:
    print(f"\nFirst token of {args.length:,} tokens, ms")
    print(f"{'engine':<24}{'phase':<10}{'median':>9}{'least':>9}{'most':>9}{'runs':>6}")
    for (name, phase), times in comparison.first_token.items():
        print(f"{name:<24}{phase:<10}{spread(times, '9.1f')}{len(times):>6}")
    hit = comparison.first_token.get((PLAIN, GPU_HIT))
    for name in (QUIRE, OFFLOADING):
        host = comparison.first_token.get((name, HOST_HIT))
        if hit and host:
            more = statistics.median(host) - statistics.median(hit)
            print(f"{name}: a host hit takes vLLM's own GPU hit and {more:.1f} ms more.")

    print(f"\n{args.workload}, output tokens/s, nothing to find")
    print(f"{'engine':<34}{'median':>9}{'least':>9}{'most':>9}{'runs':>6}")
    for name, rates in comparison.throughput.items():
        print(f"{name:<34}{spread(rates, '9,.0f')}{len(rates):>6}")
    without, connected = (comparison.throughput.get(name) for name in (PLAIN, QUIRE))
    if without and connected:
        ratio = statistics.median(connected) / statistics.median(without)
        pairs = [with_it / plain for with_it, plain in zip(connected, without, strict=False)]
        print(
            f"With Quire's connector {ratio:.1%} of the throughput without; by turns "
            f"{min(pairs):.1%} to {max(pairs):.1%}."
        )


def spread(values: list[float], form: str) -> str:
    return "".join(
        format(value, form) for value in (statistics.median(values), min(values), max(values))
    )


# --- the command line -----------------------------------------------------------------------------


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve_session(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
        return 0
    args = parse_args()
    with tempfile.TemporaryDirectory() as made:
        args.model = args.model or write_shape(args.shape, Path(made) / args.shape)
        args.vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
        comparison = Comparison(args, args.logs or Path(made))
        try:
            comparison.run()
        except KeyboardInterrupt:
            pass
        finally:
            print_table(comparison, args)
    return int(bool(comparison.failed))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face folder (default: made from --shape)")
    add("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    add("--load-format", default="dummy", help="as vLLM has it (default: %(default)s)")
    add("--length", type=int, default=16_384, help="tokens of the long prompt")
    add("--rounds", type=int, default=5, help="long prompts (default: %(default)s)")
    add("--workload", default="nano", choices=sorted(WORKLOADS))
    add("--turns", type=int, default=3, help="runs of the workload (default: %(default)s)")
    add(
        "--engines",
        default=[PLAIN, QUIRE, OFFLOADING],
        type=engine_names,
        metavar="NAMES",
        help="of plain,quire,offloading",
    )
    add("--kv-bytes", type=parse_size, default="28GiB", help="of vLLM's own KV cache")
    add("--host-bytes", type=parse_size, default="16GiB", help="of either connector")
    add("--engine-args", type=json.loads, default={}, help="JSON: more arguments of vLLM's LLM")
    add("--quire-config", type=json.loads, default={}, help="JSON: more kv_connector_extra_config")
    add("--one-at-a-time", action="store_true", help="a fresh process for each measurement")
    add("--time-limit", type=float, default=600.0, help="seconds; what is left then is not run")
    add("--logs", type=Path, help="a folder for vLLM's logs and compiled code, which is kept")
    return parser.parse_args()


def engine_names(text: str) -> list[str]:
    names = {"plain": PLAIN, "quire": QUIRE, "offloading": OFFLOADING}
    return [names[each] for each in text.split(",")]


def write_shape(shape: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3 | SHAPES[shape]))
    return folder


if __name__ == "__main__":
    sys.exit(main())
