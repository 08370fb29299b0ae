"""Cases in a process of their own, whose memory and time are bounded, and what came of each.

A case is a name and a function. It may return, which means that the input worked, or raise a
`QuireError` with one sentence. Anything else is a violation: another exception, a sentence of a
thousand characters, or the end of the process, which has `MOST_BYTES` for all of them and
`MOST_SECONDS` for each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.errors import QuireError

TESTS = Path(__file__).parents[1]
MOST_BYTES = 6 << 30  # of address space; torch and its threads take half of it
MOST_SECONDS = 180  # for a case, on a busy machine
MOST_CHARACTERS = 500  # of a sentence, besides the path in it
MOST_SHOWN = 20
INTERNALS = re.compile(r"Traceback|<class |object at 0x|\bNoneType\b|torch\.|pyo3|\n")


class Case(NamedTuple):
    name: str
    play: Callable[[Path], None]  # in an empty folder


@dataclass
class Outcome:
    worked: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # names, and the sentences
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{len(self.worked)} worked, {len(self.refused)} were refused, "
            f"{len(self.violations)} went wrong"
        )


def run_bounded(module: str, seed: int, count: int) -> Outcome:
    """Play `count` of a module's cases, chosen by the seed; raises if one of them goes wrong."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    child = subprocess.run(
        [sys.executable, "-m", module, str(seed), str(count)],
        env={**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    outcome, playing = Outcome(), ""
    for line in child.stdout.splitlines():
        name, what, text = json.loads(line)
        playing = name if what == "begins" else ""
        if what == "worked":
            outcome.worked.append(name)
        elif what == "refused":
            outcome.refused[name] = text
        elif what == "wrong":
            outcome.violations.append(f"{name}: {text}")
    if child.returncode:
        told = child.stderr[-2000:]
        outcome.violations.append(f"{playing}: it ended with status {child.returncode}: {told}")
    shown = "\n".join(outcome.violations[:MOST_SHOWN])
    assert not outcome.violations, f"{module}, seed {seed}, {count} cases: {outcome}\n{shown}"
    return outcome


def main(cases: Callable[[random.Random, int], Iterable[Case]], folder: Path) -> None:
    """The child's side, by its command line: a seed and a count."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    seed, count = map(int, sys.argv[1:])
    for i, case in enumerate(cases(random.Random(seed), count)):
        place = folder / str(i)
        place.mkdir()
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        say(case.name, "begins")
        say(case.name, *result(case, place))
        shutil.rmtree(place)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries need not be waited for


def result(case: Case, place: Path) -> tuple[str, str]:
    try:
        case.play(place)
    except QuireError as error:
        sentence = str(error).replace(str(place), "…")
        if INTERNALS.search(sentence) or len(sentence) > MOST_CHARACTERS or sentence[-1] != ".":
            return "wrong", f"this is no sentence for people: {sentence!r}"
        return "refused", sentence
    except BaseException:
        return "wrong", traceback.format_exc()[-1500:]
    return "worked", ""


def say(name: str, what: str, text: str = "") -> None:
    print(json.dumps([name, what, text]), flush=True)
