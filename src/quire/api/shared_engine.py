"""One engine for many threads: each brings its requests, and one thread at a time takes the steps.

    thread A   submit ─ step ─ step ─ step ─ all its answers are there: another may step
    thread B       submit ─ waits ───────────────────────────────────── step ─ step ─ …
    thread C                    submit ─ waits ─ its answer is there

The thread whose turn it is first does the commands of the others (submit, abort, look at the
engine), then takes a step, in which the requests of all threads are batched, and puts each output
into the inbox of the call that it belongs to. A thread keeps the turn for one step. Whenever it
leaves, with its answers or with an error, it wakes a thread that waits. So the engine needs no
thread of its own, and a single caller pays for a few operations on dicts with each step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from quire.engine.engine import Engine
from quire.engine.pooling.engine import PoolingEngine
from quire.errors import EngineFailed, QuireError, in_one_sentence

log = logging.getLogger("quire")

CLOSED = "This LLM is closed; make a new one."
INSIDE_A_STEP = (
    "This thread is in the middle of a step of this LLM, which was called again from a signal "
    "handler or a finalizer; call it from another thread."
)
LOOK_AGAIN_S = 1.0  # an interrupt can strike anywhere, even where a thread was about to wake others

T = TypeVar("T")
E = TypeVar("E", Engine, PoolingEngine)


class Waiter:
    """A thread that waits for its turn, or for what other threads' steps bring."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # A lock as a flag: no code of Python's runs in it, so that finalizers may wake, too.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the thread has been woken already
            self._asleep.release()

    def wait(self) -> None:
        """Return on a `wake` since the last call, or after `LOOK_AGAIN_S`."""
        self._asleep.acquire(timeout=LOOK_AGAIN_S)


class Command(Waiter, Generic[T]):
    """Something to do with the engine between two steps, by the thread whose turn it is."""

    def __init__(self, do: Callable[[Any], T]) -> None:
        super().__init__()
        self._do = do
        self._result: list[T] = []
        self.error: QuireError | None = None

    @property
    def is_done(self) -> bool:
        return bool(self._result) or self.error is not None

    def run(self, engine: Any) -> None:
        try:
            if engine is None:
                raise QuireError(CLOSED)
            self._result.append(self._do(engine))
        except QuireError as error:  # raised in the thread that gave the command
            self.error = error
        except Exception as error:
            log.exception("The engine failed between two steps.")
            self.error = QuireError(in_one_sentence(error))
            self.error.__cause__ = error
        self.wake()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self._result[0]


class Inbox(Waiter):
    """The latest output of each request of one call; older ones are replaced, read or not."""

    def __init__(self, requests: list[Any]) -> None:
        """The requests are the engine's own kind, and so are their outputs."""
        super().__init__()
        self.requests = requests
        self.num_unfinished = len(requests)
        self.outputs: dict[str, Any] = {}  # by request
        self.submission: Command[None] | None = None


class SharedEngine(Generic[E]):
    """Only the thread that has the turn touches the engine. What several threads touch at once (the
    turn, the waiting threads, the commands, the outputs) are dicts and deques, and each access to
    them is one atomic operation."""

    def __init__(self, engine: E) -> None:
        self._engine: E | None = engine
        # Runs without `close`, too.
        self._close_engine: Callable[[], Any] = weakref.finalize(self, engine.close)
        # Empty, or with the holder of the turn as its one entry. `setdefault` takes the turn and
        # says whether it did, in one operation: no interrupt can come between, as with a lock.
        self._turn: dict[str, Waiter] = {}
        self._waiting: dict[Waiter, None] = {}
        self._commands: deque[Command[Any]] = deque()
        self._open: dict[str, tuple[Any, Inbox]] = {}  # only the holder of the turn touches it
        self._failure: EngineFailed | None = None
        self._has_broken_off = False  # true while a step or a command is under way
        self._is_closing = False
        self.num_generated_tokens = engine.num_generated_tokens

    @property
    def engine(self) -> E:
        """To read what does not change while the engine steps."""
        engine = self._engine
        if engine is None or self._is_closing:
            raise QuireError(CLOSED)
        return engine

    # --- calls ----------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, requests: list[Any]) -> Iterator[Inbox]:
        """Start requests, whose outputs come into the inbox; the end aborts unfinished ones.

        A generator that is garbage-collected ends this block in any thread and at any moment. So
        the end only queues a command, which runs before the engine is next used.
        """
        self.check()
        inbox = Inbox(requests)
        inbox.submission = Command(partial(self._submit, inbox))
        try:
            self._commands.append(inbox.submission)
            yield inbox
        finally:
            if inbox.num_unfinished:
                self._commands.append(Command(partial(self._abort, [each.id for each in requests])))
            self._end_turn(inbox)
            self.hand_over()

    def advance(self, inbox: Inbox) -> None:
        """Take a step, or wait until a step of another thread has brought an output.

        Call it until the inbox has what it should. A thread that does something else between two
        calls has to `hand_over` first.
        """
        inbox.thread = threading.get_ident()
        try:
            if self._take_turn(inbox):
                self._run_commands()
                self.check(inbox)
                self._step()
            elif inbox.num_unfinished:
                self.check(inbox)
        finally:
            self._end_turn(inbox)

    def hand_over(self) -> None:
        """Wake a waiting thread to take the steps, if no thread has the turn."""
        if not self._turn:
            with suppress(KeyError):  # no thread waits
                self._waiting.popitem()[0].wake()

    def between_steps(self, do: Callable[[E], T]) -> T:
        """Call `do` while no step is under way, and return its result."""
        command = Command(do)
        self._commands.append(command)
        try:
            while not command.is_done:
                if self._take_turn(command):
                    self._run_commands()
                self._end_turn(command)
        finally:
            self._end_turn(command)
            self.hand_over()
        return command.result()

    def close(self) -> None:
        """Close the engine after the step that is under way. Open calls end with an error."""
        self._is_closing = True
        for waiter in list(self._waiting):
            waiter.wake()
        with suppress(QuireError):  # another thread has closed it
            self.between_steps(self._end)

    # --- turns ----------------------------------------------------------------------------------

    def _take_turn(self, waiter: Waiter) -> bool:
        """Take the turn if it is free; otherwise wait to be woken, and return False."""
        self._waiting[waiter] = None  # first, so that a thread which leaves right now sees it
        holder = self._turn.setdefault("holder", waiter)
        if holder is waiter:
            return True
        if holder.thread == waiter.thread:
            raise QuireError(INSIDE_A_STEP)
        waiter.wait()
        return False

    def _end_turn(self, waiter: Waiter) -> None:
        """Give the turn back; a waiter that does not have it may call this, too."""
        self._waiting.pop(waiter, None)
        if self._turn.get("holder") is waiter:
            del self._turn["holder"]

    def check(self, inbox: Inbox | None = None) -> None:
        """Raise the error that has ended this call, if there is one."""
        if self._is_closing:
            raise QuireError(CLOSED)
        if self._failure is not None:
            raise EngineFailed(str(self._failure))
        if inbox is not None and inbox.submission is not None and inbox.submission.error:
            raise inbox.submission.error

    # --- with the turn --------------------------------------------------------------------------

    def _run_commands(self) -> None:
        if self._has_broken_off:
            self._put_right()
        self._has_broken_off = True
        while self._commands:
            self._commands[0].run(self._engine)
            self._commands.popleft()  # only now: if it is interrupted, another thread runs it
        self._has_broken_off = False

    def _put_right(self) -> None:
        """Bring engine and inboxes into order after an interrupt, which may strike anywhere.

        The engine reports the end of a request only once. If the interrupt came before that output
        was delivered, it is delivered here.
        """
        engine = self._engine
        if engine is None or self._failure is not None:
            return
        engine.begin_again()
        for request, _ in list(self._open.values()):
            if request.finished:
                engine.abort_request(request.id)
                self._deliver([engine.output(request)])

    def _submit(self, inbox: Inbox, engine: E) -> None:
        for request in inbox.requests:
            if engine.find_request(request.id) is None:  # else an interrupt came after `submit`
                engine.submit(request)
            self._open[request.id] = request, inbox

    def _abort(self, request_ids: list[str], engine: E) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            engine.abort_request(request_id)

    def _step(self) -> None:
        assert self._engine is not None
        self._has_broken_off = True
        try:
            self._deliver(self._engine.step())
        except EngineFailed as error:
            self._failure = error
            for waiter in list(self._waiting):
                waiter.wake()
            raise
        except QuireError:
            raise
        except Exception as error:
            log.exception("A step of the engine failed.")
            raise QuireError(in_one_sentence(error)) from error
        self._has_broken_off = False
        self.num_generated_tokens = self._engine.num_generated_tokens

    def _deliver(self, outputs: Sequence[Any]) -> None:
        """Put them into their inboxes, and wake the threads that wait there."""
        inboxes: dict[Inbox, None] = {}
        for output in outputs:
            if (found := self._open.get(output.request_id)) is not None:
                _, inbox = found
                if output.finished:
                    inbox.num_unfinished -= 1
                inbox.outputs[output.request_id] = output
                if output.finished:
                    del self._open[output.request_id]
                inboxes[inbox] = None
        for inbox in inboxes:
            inbox.wake()

    def _end(self, engine: E) -> None:
        self._engine = None
        self._open.clear()
        self._close_engine()
