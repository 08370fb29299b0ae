"""Rounds of random load until the time is over; exit status 1 with one sentence if one breaks."""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_model import Broken
from redis_server import RedisServer
from tcp_proxy import TcpProxy

from soak.checks import Leaks
from soak.faults import FlakyDisk, InjectedFailure
from soak.round import Surroundings, play
from soak.tally import Tally
from soak.violation import Violation, require

ROUND_S = 2.5
PROGRESS_S = 5.0


def main() -> int:
    options = _options()
    tally, watch = Tally(), _Watch()
    print(f"soak: {options.seconds:.0f} s with seed {options.seed}", flush=True)
    try:
        with _surroundings() as around:
            _soak(around, options, tally, watch)
    except (Exception, Broken) as error:
        traceback.print_exc()
        print(tally.table())
        print(
            f"soak: {_sentence(error)} To repeat: make soak SECONDS={options.seconds:.0f} "
            f"SEED={options.seed} (this was round {tally.counts['rounds']}).",
            flush=True,
        )
        return 1
    print(tally.table())
    print(f"soak: {tally.seconds:.0f} s without a wrong answer or a leak", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--first-round", type=int, default=0, help="begin with this one")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


def _soak(around: Surroundings, options: argparse.Namespace, tally: Tally, watch: _Watch) -> None:
    leaks, shown = Leaks(), time.monotonic()

    def on_step() -> None:
        nonlocal shown
        require(not watch.seen, " ".join(watch.seen))
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(tally.line(), flush=True)

    number = options.first_round
    while (left := options.seconds - tally.seconds) > 0:
        play(around, f"{options.seed}/{number}", min(ROUND_S, left), tally, on_step)
        leaks.check(tally)
        on_step()
        number += 1


@contextmanager
def _surroundings() -> Iterator[Surroundings]:
    scratch = tempfile.TemporaryDirectory(prefix="quire-soak-", ignore_cleanup_errors=True)
    with scratch as name, pytest.MonkeyPatch.context() as patches:
        folder = Path(name)
        (folder / "redis").mkdir()
        server = RedisServer(folder / "redis")
        proxy = TcpProxy(server.port)
        try:
            yield Surroundings(folder / "ssd", FlakyDisk(patches, folder / "ssd"), server, proxy)
        finally:
            proxy.vanish()
            server.kill()


class _Watch(logging.Handler):
    """Exceptions that a thread swallowed or died of: each is a bug, whatever the answers say."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        threading.excepthook = self._thread_died
        log = logging.getLogger("quire")
        log.addHandler(self)
        log.propagate = False  # warnings of what was injected would bury everything else

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, InjectedFailure):
            self._note("A thread of the tiers met a bug", error)

    def _thread_died(self, args: threading.ExceptHookArgs) -> None:
        self._note("A thread died", args.exc_value)

    def _note(self, what: str, error: BaseException | None) -> None:
        traceback.print_exception(error)
        self.seen.append(f"{what}: {error!r}.")


def _sentence(error: BaseException) -> str:
    """An assertion has no sentence but its own line; any other exception is a bug too."""
    if isinstance(error, (Violation, Broken)):
        return str(error)
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {error}."
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"It does not hold that `{where.line}` ({Path(where.filename).name}:{where.lineno})."


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread that hangs is a violation, and not a reason to hang as well
