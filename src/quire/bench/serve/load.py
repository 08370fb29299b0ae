"""The whole load: in this process, or dealt out to several that start at the same moment."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar

from quire.bench.serve.answer import Outcome
from quire.bench.serve.client import Load, clock
from quire.bench.serve.target import Target
from quire.bench.serve.workload import Request
from quire.errors import QuireError

T = TypeVar("T")
HEAD_START = 0.05  # seconds between the word to start and the start
FEW_CORES = 4


@dataclass(frozen=True)
class Result:
    outcomes: list[Outcome]
    cpu_seconds: list[float]  # of each process
    interrupted: bool


def default_processes() -> int:
    """A quarter of the cores: the server may need the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(8, (cores or 1) // FEW_CORES))


def run_load(
    target: Target, requests: Sequence[Request], processes: int, on_done: Callable[[], object]
) -> Result:
    allow_many_connections()
    if processes == 1:
        load = Load(target, requests, on_done)
        outcomes, cpu = _run_here(load, clock() + HEAD_START)
        return Result(outcomes, [cpu], load.interrupted)
    return _Processes(target, requests, min(processes, len(requests))).run(on_done)


def _run_here(load: Load, start: float) -> tuple[list[Outcome], float]:
    before = time.process_time()
    outcomes = run_async(load.run(start))
    return outcomes, time.process_time() - before


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """On the lighter event loop where there is one: half the time for each token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


class _Processes:
    """Every n-th request goes to the same process; each tells when one of its own has ended."""

    def __init__(self, target: Target, requests: Sequence[Request], processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._interrupted = False
        self._processes = []
        self._links: list[Connection] = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            part = requests[number::processes]
            process = context.Process(target=_work, args=(theirs, target, part), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._links.append(ours)

    def run(self, on_done: Callable[[], object]) -> Result:
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            for link in self._links:
                self._receive(link)  # it is ready
            start = clock() + HEAD_START
            for link in self._links:
                link.send(start)
            return self._collect(on_done)
        finally:
            signal.signal(signal.SIGINT, previous)
            for process in self._processes:
                process.terminate()
                process.join()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C ends the requests, which are then reported; a second one all."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        for process in self._processes:
            os.kill(process.pid or 0, signal.SIGINT)

    def _collect(self, on_done: Callable[[], object]) -> Result:
        found: list[tuple[list[Outcome], float]] = []
        busy = list(self._links)
        while busy:
            for link in [link for link in busy if link in wait(busy)]:
                message = self._receive(link)
                if message is None:
                    on_done()
                else:
                    found.append(message)
                    busy.remove(link)
        outcomes = [outcome for part, _ in found for outcome in part]
        return Result(outcomes, [cpu for _, cpu in found], self._interrupted)

    @staticmethod
    def _receive(link: Connection) -> Any:
        try:
            return link.recv()
        except EOFError:
            raise QuireError("A process of the load ended early; try --processes 1.") from None


def _work(link: Connection, target: Target, requests: Sequence[Request]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the load runs and can end in order
    allow_many_connections()
    load = Load(target, requests, on_done=lambda: link.send(None))
    link.send(None)
    link.send(_run_here(load, link.recv()))


def allow_many_connections() -> None:
    """Each open request holds a file; the usual limit is 1,024."""
    try:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ImportError, OSError, ValueError):
        pass
