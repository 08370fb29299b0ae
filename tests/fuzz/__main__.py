"""Run fuzzers at full size, or for as long as there is time; exit status 1 if one finds something.

They take turns: each has an equal share of the time that is left, and does its cases in slices, so
that what went wrong can be repeated by one short command.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from types import ModuleType

from fuzz import full, fuzzers, small


def main() -> int:
    options = _options()
    found = fuzzers()
    chosen = sorted(options.names or found, key=lambda name: full(found[name]))  # the longest last
    end = time.monotonic() + options.seconds
    print(f"fuzz: {options.seconds:.0f} s with seed {options.seed}", flush=True)
    for at, name in enumerate(chosen):
        share = (end - time.monotonic()) / (len(chosen) - at)
        if not _fuzz(name, found[name], options, time.monotonic() + share):
            return 1
    return 0


def _options() -> argparse.Namespace:
    known = sorted(fuzzers())
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--count", type=int, default=None, help="cases; default: full size")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no fuzzer {', '.join(unknown)}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


def _fuzz(name: str, module: ModuleType, options: argparse.Namespace, end: float) -> bool:
    wanted, done, seed = options.count or full(module), 0, options.seed
    while done < wanted and (done == 0 or time.monotonic() < end):
        count = min(small(module), wanted - done)
        try:
            module.run(seed, count)
        except Exception:
            traceback.print_exc()
            print(
                f"fuzz: {name} has found something. To repeat: PYTHONPATH=tests python -m fuzz "
                f"{name} --seed {seed} --count {count}",
                flush=True,
            )
            return False
        done, seed = done + count, seed + 1
    print(f"fuzz: {name}: {done:,} of {wanted:,} cases, nothing found", flush=True)
    return True


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # whatever threads an engine that failed has left behind
