"""Whether a change makes Quire slower: two checkouts take turns on one machine.

    python scripts/compare_trees.py ../before . smollm2 --case stream1 --case cpu
    python scripts/compare_trees.py ../before . qwen3-8b --case nano --case prefill:8192 \\
        --set load_format=dummy --set num_blocks=12000
    python scripts/compare_trees.py ../before . qwen3-8b --case start --rounds 12 \\
        --set load_format=dummy

Both engines are open at once, each in a process that imports its own checkout, and each round runs
a case on one and then on the other. What is shown is the time of the second against the first,
round by round: a machine that is slower for a minute is slower for both. On a GPU blocks are
counted out (`num_blocks`): to size a pool by what is left, the second engine would find the first
one's memory taken. `start` opens one at a time, in either order, and has the processor time that a
start took, too: what others do on the machine disturbs that less.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

LARGEST_ID = 10_000


# --- one checkout's process -----------------------------------------------------------------------


def run_arm() -> None:
    """Open an engine, say how long that took, then time the case that each line names."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is for people
    settings = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    from quire import LLM

    arm = Arm(LLM(**settings))
    print(time.perf_counter() - started, time.process_time(), file=answers)
    for line in sys.stdin:
        case, _, size = line.strip().partition(":")
        seed = int(sys.stdin.readline())
        gc.collect()  # or a full collection falls into one checkout's time and not the other's
        sizes = [int(size)] if size else []
        print(getattr(arm, case)(random.Random(seed), *sizes), file=answers)
    arm.llm.close()


class Arm:
    """Each case returns seconds; the same seed means the same requests."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def nano(self, r: random.Random, count: int = 256) -> float:
        prompts = [_prompt(r, r.randint(100, 1024)) for _ in range(count)]
        return self._seconds(prompts, [r.randint(100, 1024) for _ in prompts], temperature=0.6)

    def cpu(self, r: random.Random, count: int = 32) -> float:
        prompts = [_prompt(r, r.randint(32, 256)) for _ in range(count)]
        return self._seconds(prompts, [64] * count)

    def stream1(self, r: random.Random, out: int = 256) -> float:
        """A token after the first."""
        prompt = _prompt(r, 512)
        first = self._seconds([prompt], [1])
        return (self._seconds([prompt], [out]) - first) / (out - 1)

    def prefill(self, r: random.Random, length: int = 1024) -> float:
        return self._seconds([_prompt(r, length)], [1])

    def cached(self, r: random.Random, length: int = 1024) -> float:
        prompt = _prompt(r, length)
        self._seconds([prompt], [1])
        return self._seconds([prompt], [1], is_cold=False)

    def _seconds(
        self,
        prompts: list[list[int]],
        lengths: Sequence[int],
        temperature: float = 0.0,
        is_cold: bool = True,
    ) -> float:
        from quire import SamplingParams

        if is_cold:
            self.llm.reset_prefix_cache()
        params = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=i)
            for i, length in enumerate(lengths)
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        for output in outputs:
            if getattr(output, "error", None) is not None:
                raise SystemExit(f"A request failed: {output.error}")
        return seconds


def _prompt(r: random.Random, length: int) -> list[int]:
    return [r.randint(0, LARGEST_ID) for _ in range(length)]


START = "start"
CASES = [START, *(name for name in vars(Arm) if not name.startswith("_"))]


# --- both, in turns -------------------------------------------------------------------------------


class Checkout:
    def __init__(self, tree: Path, settings: dict[str, Any]) -> None:
        if not (tree / "src/quire").is_dir():
            raise SystemExit(f"{tree} is no checkout of Quire: it has no src/quire.")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--arm"],
            env={**os.environ, "PYTHONPATH": _ahead_of_path(tree / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.start_s, self.start_processor_s = self._ask(json.dumps(settings))

    def seconds(self, case: str, seed: int) -> float:
        [seconds] = self._ask(f"{case}\n{seed}")
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, line: str) -> list[float]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(line, file=stdin)
        if not (answer := stdout.readline()):
            raise SystemExit("An engine ended; its error is above.")
        return [float(number) for number in answer.split()]


def _ahead_of_path(folder: Path) -> str:
    others = os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, [str(folder.resolve()), others]))


def compare(before: Checkout, after: Checkout, case: str, rounds: int) -> str:
    times: list[tuple[float, float]] = []
    for seed in range(rounds + 1):
        arms = [before, after] if seed % 2 else [after, before]
        taken = {arm: arm.seconds(case, seed) for arm in arms}
        times.append((taken[before], taken[after]))
    return summary(case, times[1:])  # without the warm-up


def compare_starts(opens: tuple[Callable[[], Checkout], ...], rounds: int) -> str:
    times: list[list[float]] = []
    processor_times: list[list[float]] = []
    for number in range(rounds + 1):
        taken: dict[int, Checkout] = {}
        for which in (0, 1) if number % 2 else (1, 0):
            taken[which] = opens[which]()
            taken[which].close()
        times.append([taken[which].start_s for which in (0, 1)])
        processor_times.append([taken[which].start_processor_s for which in (0, 1)])
    return f"{summary(START, times[1:])}\n{summary('on processors', processor_times[1:])}"


def summary(case: str, times: Sequence[Sequence[float]]) -> str:
    ratios = [new / old for old, new in times]
    old, new = (statistics.median(each) for each in zip(*times, strict=True))
    # The median is of logarithms, so that it is the same whichever comes first: where whoever is
    # first in a round is slower by a fifth, the plain median of 0.83 and 1.2 says that the second
    # one is.
    middle = math.exp(statistics.median(map(math.log, ratios)))
    return (
        f"{case:<16} {old:10.4g} s {new:10.4g} s   {middle:.3f} of the time "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes name=value, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("model", help="what both open")
    parser.add_argument(
        "--case",
        action="append",
        required=True,
        metavar="NAME[:SIZE]",
        help=f"one of {', '.join(CASES)}; SIZE is a number of requests, or of tokens",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each case, after a warm-up")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="a setting of both engines, as LLM has it",
    )
    parser.add_argument(
        "--set-second",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="a setting of the second alone: a checkout may be compared with itself",
    )
    args = parser.parse_args()
    for case in args.case:
        name, colon, size = case.partition(":")
        takes_size = colon and name != START
        if name not in CASES or (colon and not (takes_size and size.isdecimal() and int(size) > 1)):
            parser.error(f"--case takes one of {', '.join(CASES)}, or NAME:SIZE, not {case!r}")
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    settings = {"model": args.model, **dict(args.settings)}
    opens = (
        partial(Checkout, args.before, settings),
        partial(Checkout, args.after, {**settings, **dict(args.set_second)}),
    )
    if START in args.case:
        print(compare_starts(opens, args.rounds), flush=True)
    if cases := [case for case in args.case if case != START]:
        before, after = (open_checkout() for open_checkout in opens)
        for case in cases:
            print(compare(before, after, case, args.rounds), flush=True)
        before.close()
        after.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--arm"]:
        run_arm()
    else:
        main()
