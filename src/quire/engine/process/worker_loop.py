"""What the engine's process does, whatever engine it has: reads, steps, and says what is new.

    while not told to stop:   commands that have come  ─►  one step  ─►  one message of updates

It waits for commands only while it has nothing to compute.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from quire.engine.process.link import Link
from quire.engine.process.messages import LinkClosed, Message, unpack_options
from quire.engine.process.reports import Opened, Reports
from quire.errors import EngineFailed, QuireError, RequestError, in_one_sentence
from quire.request_options import RequestOptions

log = logging.getLogger("quire")

IDLE_S = 1.0  # how often a worker looks after itself while nothing is computed
SEND_S = 5.0
MOST_FAILURES = 3  # steps in a row that raise before the engine is given up

Call = Callable[..., Any]
R = TypeVar("R", bound=Opened)


class WorkerLoop(ABC, Generic[R]):
    """Keeps the open requests; a subclass has the engine, and says how it is asked and told of."""

    def __init__(self, link: Link) -> None:
        self.calls: dict[str, Call] = {"ping": lambda: None}
        self.busy_s = 0.0  # time spent on steps and on what is told before and after each
        self._link = link
        self._reports = Reports()
        self._open: dict[int, R] = {}
        self._queued: dict[int, R] = {}  # those that were never admitted
        self._stopping = False
        self._num_failures = 0

    # --- what a subclass has --------------------------------------------------------------------

    @abstractmethod
    def _add(self, number: int, prompt: str, params: Message, options: RequestOptions) -> R:
        """Make a request and give it to the engine; RequestError if it cannot be one."""

    @abstractmethod
    def _advance(self) -> None:
        """Take a step, and report those that have news."""

    @abstractmethod
    def _abort(self, number: int) -> None: ...

    def _check(self) -> None:
        """Raise what has ended the engine, if anything has."""

    def _idle(self) -> None:
        """Nothing is to be computed."""

    def _after_turn(self) -> None:
        """What is to be looked after however it went."""

    def _patience(self) -> float:
        """How long to wait for commands while nothing is computed."""
        return IDLE_S

    def _beside(self) -> Message:
        """What is told along with all else."""
        return {}

    # --- turns ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Until told to stop, or the other process is gone; the status to exit with."""
        try:
            while not self._stopping:
                self._turn()
        except LinkClosed:
            log.info("The server is gone; the engine ends.")
        except EngineFailed as error:
            log.error("%s", error)
            self._fail_all(error)
            self._link.finish(SEND_S)
            self._report()
            self._link.finish(SEND_S)
            return 1
        return 0

    def _turn(self) -> None:
        started, busy = time.perf_counter(), bool(self._open)
        self._obey(self._link.receive(0.0 if busy else self._patience()))
        self._check()
        if self._open:
            self._step()
        else:
            self._idle()
        self._after_turn()
        self._report()
        if busy:
            self.busy_s += time.perf_counter() - started

    # --- commands -----------------------------------------------------------------------------

    def _obey(self, commands: list[Message]) -> None:
        for command in commands:
            do = command.pop("do")
            getattr(self, f"_do_{do}")(**command)

    def _do_add(self, number: int, prompt: str, params: Message, options: Message) -> None:
        try:
            opened = self._add(number, prompt, params, unpack_options(options))
        except RequestError as error:
            self._reports.fail(number, str(error), "request")
            return
        self._open[number] = self._queued[number] = opened

    def _do_abort(self, number: int) -> None:
        if self._forget(number) is not None:
            self._abort(number)

    def _do_call(self, number: int, name: str, args: Message) -> None:
        if name not in self.calls:
            self._reports.answer(number, error=f"The engine has no call {name!r}.")
            return
        try:
            self._reports.answer(number, value=self.calls[name](**args))
        except QuireError as error:
            self._reports.answer(number, error=str(error))
        except Exception as error:
            log.exception("The call %s failed.", name)
            self._reports.answer(number, error=in_one_sentence(error))

    def _do_stop(self) -> None:
        self._stopping = True

    # --- steps --------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            self._advance()
        except EngineFailed:
            raise
        except Exception as error:
            self._give_up(error)
            return
        self._num_failures = 0

    def _tell_admitted(self, now: float) -> None:
        """`now` is when the step was planned that admitted them, or did not."""
        for opened in list(self._queued.values()):
            if opened.is_admitted:
                del self._queued[opened.number]
                self._reports.admit(opened, now)
            elif opened.deadline is not None and now > opened.deadline:
                waited = now - opened.arrived
                self._do_abort(opened.number)
                says = f"The request waited {waited:.0f} s for its turn; try again later."
                self._reports.fail(opened.number, says, "queue")

    def _forget(self, number: int) -> R | None:
        self._queued.pop(number, None)
        return self._open.pop(number, None)

    def _give_up(self, error: Exception) -> None:
        """A step raised, which the engine's own recovery should have met: end what is open."""
        log.exception("A step of the engine failed.")
        self._num_failures += 1
        self._fail_all(error)
        if self._num_failures >= MOST_FAILURES:
            raise error

    def _fail_all(self, error: Exception) -> None:
        for number in list(self._open):
            self._do_abort(number)
            self._reports.fail(number, in_one_sentence(error), "engine")

    def _report(self) -> None:
        if not self._link.is_free:
            return
        beside = self._beside()
        if self._reports or beside:
            self._link.send({**self._reports.take(), **beside})
