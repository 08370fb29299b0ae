"""A batch without a server: a file of requests in, a file of results out."""

from __future__ import annotations

import asyncio
import fcntl
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.api.server.app import ROUTERS, make_inner_app
from quire.api.server.batch.in_process import InProcessClient, endpoints_of
from quire.api.server.batch.lines import count_lines
from quire.api.server.batch.run import BatchRun
from quire.api.server.batch.slots import LineSlots
from quire.api.server.keys import ANYONE, Keys
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState
from quire.config import EngineConfig
from quire.engine.process.client import EngineClient
from quire.errors import ConfigError, EngineFailed

LOOK_S = 0.2
DIED = "The engine's process has ended; see its log. Run the command again to go on from here."


@dataclass(frozen=True)
class Progress:
    total: int  # lines of the input
    done: int  # with a result, those of earlier runs too
    num_errors: int  # of the lines of this run
    is_over: bool = False


def answer_file(
    source: Path,
    results: Path,
    settings: ServerConfig,
    engine: EngineConfig,
    show: Callable[[Progress], None],
    *,
    shows_start: bool = False,
) -> Progress:
    """Answer the lines that `results` has no result for; the last progress, on an interrupt too."""
    if not source.is_file():
        raise ConfigError(f"There is no file {source} to read requests from.")
    if results.exists() and results.samefile(source):
        raise ConfigError("The results would overwrite the requests; name another file for them.")
    with _locked(results):
        return asyncio.run(_answer(source, results, settings, engine, show, shows_start))


@contextmanager
def _locked(results: Path) -> Iterator[None]:
    """Of two runs at once, each would answer every line."""
    try:
        file = results.open("ab")
    except OSError as error:
        raise ConfigError(f"{results} cannot be written: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another run writes into {results}; wait for its end.") from None
        yield


async def _answer(
    source: Path,
    results: Path,
    settings: ServerConfig,
    engine: EngineConfig,
    show: Callable[[Progress], None],
    shows_start: bool,
) -> Progress:
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    total = await asyncio.to_thread(count_lines, source)
    client = await _started(engine, shows_start, interrupted)
    try:
        app = make_inner_app(ServerState(settings, client, engine.model, Keys()))
        with LineSlots(settings.batch_concurrency).share(ANYONE) as slots:
            run = BatchRun(
                source,
                InProcessClient(app, ANYONE),
                endpoints_of(ROUTERS),
                results,
                results,
                slots,
                max_line_bytes=settings.max_body_bytes,
            )
            try:
                async for is_over in _until_over(run, client, interrupted):
                    progress = Progress(total, run.completed, run.num_errors, is_over)
                    show(progress)
            finally:
                run.close()
    finally:
        await client.stop()
    return progress


async def _started(
    engine: EngineConfig, shows_start: bool, interrupted: asyncio.Event
) -> EngineClient:
    """The engine's process, with its model; KeyboardInterrupt if that is not waited for."""
    start = EngineClient.start(engine, progress=shows_start, log_level="WARNING")
    starting, asked = asyncio.create_task(start), asyncio.create_task(interrupted.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})
    raise KeyboardInterrupt


async def _until_over(
    run: BatchRun, client: EngineClient, interrupted: asyncio.Event
) -> AsyncIterator[bool]:
    """Now and then whether all lines have their results; ends then, or on an interrupt."""
    running = asyncio.create_task(run.run())
    ends = [running, *(asyncio.create_task(each.wait()) for each in (client.died, interrupted))]
    try:
        while not any(each.done() for each in ends):
            await asyncio.wait(ends, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                yield False
        if running.done():
            await running
        elif client.died.is_set():
            raise EngineFailed(DIED)
        yield running.done()
    finally:
        for each in ends:
            each.cancel()
        await asyncio.wait(ends)
