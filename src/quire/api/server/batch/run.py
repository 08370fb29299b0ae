"""One batch being answered: lines are asked for at once as far as there are slots.

    input ─ lines without a result ─► slot ─► the route ─► results, in the order they come

It may be killed at any moment. A later run over the same files asks for the lines that have no
result, so every line has one result in the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from quire.api.server.batch.in_process import InProcessClient
from quire.api.server.batch.lines import InputLine, LineError, read_lines
from quire.api.server.batch.results import (
    AnsweredLines,
    ResultsFile,
    answer_result,
    error_result,
)
from quire.api.server.batch.slots import BatchSlots

NOT_NOW = (429, 503)  # the server is full, or it ends: this is not the line's answer
AGAIN_S = 1.0
EXPIRED = LineError("batch_expired", "The batch's time was over before the line's turn came.")


class BatchRun:
    """`outputs` may be the same file as `errors`."""

    def __init__(
        self,
        source: Path,
        client: InProcessClient,
        endpoints: Collection[str],
        outputs: Path,
        errors: Path,
        slots: BatchSlots,
        *,
        max_line_bytes: int,
        expires_at: float | None = None,
    ) -> None:
        """`expires_at` is a moment of `time.time()`."""
        self._source = source
        self._client = client
        self._endpoints = endpoints
        self._slots = slots
        self._max_line_bytes = max_line_bytes
        self._expires_at = expires_at
        self._answered = AnsweredLines()
        self._outputs = ResultsFile(outputs, self._answered)
        self._errors = self._outputs if errors == outputs else ResultsFile(errors, self._answered)
        self.num_errors = 0  # of the lines of this run
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def completed(self) -> int:
        return self._outputs.num_results

    @property
    def failed(self) -> int:
        return self._errors.num_results

    async def run(self) -> None:
        """Until every line has a result; what is cancelled on the way is asked for next time."""
        lines = read_lines(self._source, self._max_line_bytes)
        try:
            while (line := await asyncio.to_thread(self._next, lines)) is not None:
                turn = await self._slots.acquire()
                if self._failure is not None:
                    self._slots.release()
                    break
                task = asyncio.create_task(self._answer(line, turn))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            self._slots.ask_no_more()
            while self._tasks:
                await asyncio.wait(self._tasks)
            if self._failure is not None:
                raise self._failure
        finally:
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)

    def close(self) -> None:
        self._outputs.close()
        if self._errors is not self._outputs:
            self._errors.close()

    def _next(self, lines: Iterator[InputLine]) -> InputLine | None:
        return next((line for line in lines if not self._answered.has(line)), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()  # a result could not be written: the others neither

    async def _answer(self, line: InputLine, turn: int) -> None:
        error = line.error or self._refusal(line)
        if error is not None:
            self._add_error(line, error_result(line, error))
            return
        status, body = await self._client.ask(line, turn)
        while status in NOT_NOW:
            await asyncio.sleep(AGAIN_S)
            status, body = await self._client.ask(line, turn)
        self._slots.reach(turn)
        result = answer_result(line, status, body)
        if status == 200:
            self._outputs.append(line, result)
        else:
            self._add_error(line, result)

    def _add_error(self, line: InputLine, result: bytes) -> None:
        self._errors.append(line, result)
        self.num_errors += 1

    def _refusal(self, line: InputLine) -> LineError | None:
        if line.url not in self._endpoints:
            says = f"The url must be {' or '.join(self._endpoints)}, not {line.url[:200]!r}."
            return LineError("invalid_url", says)
        if self._expires_at is not None and time.time() > self._expires_at:
            return EXPIRED
        return None
