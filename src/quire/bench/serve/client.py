"""One process's part of the load: requests leave when they are due, whatever became of others."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import aiohttp

from quire.bench.serve.answer import Answer, Outcome, message_of
from quire.bench.serve.target import Target
from quire.bench.serve.workload import Request

MOMENT = 0.1  # seconds
SLEEP_STEP = 0.002  # the loop's timer is a millisecond coarse, so the rest of a wait is spent awake
KEEP_ALIVE = 2.0  # seconds; a server that closes idle connections waits longer than that
LONGEST_MESSAGE = 4096

clock = time.monotonic  # all processes of a machine read the same one


class Load:
    """Sends requests and collects exactly one outcome for each of them."""

    def __init__(
        self, target: Target, requests: Sequence[Request], on_done: Callable[[], object]
    ) -> None:
        self.interrupted = False
        self._target = target
        self._requests = requests
        self._on_done = on_done
        self._outcomes = [Outcome(request.at, request.num_out) for request in requests]
        self._tasks: list[asyncio.Task[None]] = []
        self._bodies = deque(map(target.body, self._due_together(0)))

    async def run(self, start: float) -> list[Outcome]:
        """Begin at `start`; returns when every request has ended."""
        with _on_interrupt(self.interrupt):
            async with open_session(self._target) as session:
                sender = asyncio.ensure_future(self._send_all(session, start))
                self._tasks.append(sender)
                await asyncio.gather(sender, return_exceptions=True)
                await asyncio.gather(*self._tasks, return_exceptions=True)
        self._raise_bugs()
        for outcome in self._outcomes:
            if outcome.total is None:
                outcome.fail("interrupted", "it was not sent")
        return self._outcomes

    def interrupt(self) -> None:
        self.interrupted = True
        for task in self._tasks:
            task.cancel()

    async def _send_all(self, session: aiohttp.ClientSession, start: float) -> None:
        for number, request in enumerate(self._requests):
            if not self._bodies:
                for each in self._due_together(number):
                    self._bodies.append(self._target.body(each))
                    await asyncio.sleep(0)  # a long prompt takes a millisecond
            due = start + request.at
            await _wait_until(due)
            task = self._answer(session, self._bodies.popleft(), self._outcomes[number], due)
            self._tasks.append(asyncio.ensure_future(task))

    def _due_together(self, number: int) -> Iterator[Request]:
        """Requests of one moment, from this one on: their bodies are written before it has come."""
        end = self._requests[number].at + MOMENT
        while number < len(self._requests) and self._requests[number].at <= end:
            yield self._requests[number]
            number += 1

    async def _answer(
        self, session: aiohttp.ClientSession, body: bytes, outcome: Outcome, due: float
    ) -> None:
        outcome.late = clock() - due
        try:
            await ask(session, self._target, body, outcome, due)
        except asyncio.CancelledError:
            outcome.fail("interrupted")
        outcome.total = clock() - due
        self._on_done()

    def _raise_bugs(self) -> None:
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


def open_session(target: Target) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=target.timeout, sock_read=target.timeout
        ),
        headers=target.headers,
    )


async def ask(
    session: aiohttp.ClientSession, target: Target, body: bytes, outcome: Outcome, due: float
) -> None:
    """Send one request and read its answer; what goes wrong is said in the outcome."""
    try:
        async with session.post(target.url, data=body) as response:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", await _reason(response))
            elif response.content_type != "text/event-stream":
                outcome.fail("no stream", f"the answer is {response.content_type}")
            else:
                answer = Answer(outcome)
                async for data in response.content.iter_any():
                    answer.feed(data, clock() - due)
                answer.close()
    except asyncio.TimeoutError:
        outcome.fail("timeout", f"nothing came for {target.timeout:g} s")
    except aiohttp.ClientConnectorError as error:
        outcome.fail("no connection", error.strerror or str(error))
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError) as error:
        outcome.fail("disconnected", str(error))
    except (aiohttp.ClientError, OSError) as error:
        outcome.fail(type(error).__name__, str(error))


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(LONGEST_MESSAGE)).decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return message_of(answer)


async def _wait_until(due: float) -> None:
    while (left := due - clock()) > 0:
        await asyncio.sleep(left - SLEEP_STEP if left > SLEEP_STEP else 0)


@contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C ends the requests, not the program: what was measured until then is shown."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    # Not on every system, and only in a main thread; elsewhere Ctrl-C ends the program.
    with suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError), _no_interrupts():
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C may come twice, by the terminal and by the parent: the second waits a moment."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
