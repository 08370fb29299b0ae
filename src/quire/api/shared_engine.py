"""One engine for many threads: each brings its requests, and one thread at a time takes the steps.

    thread A   submit ─ step ─ step ─ step ─ all its answers are there: another may step
    thread B       submit ─ waits ───────────────────────────────────── step ─ step ─ …
    thread C                    submit ─ waits ─ its answer is there

The thread whose turn it is first does the commands of the others (submit, abort, look at the
engine), then takes a step, in which the requests of all threads are batched, and puts each output
into the inbox of the call that it belongs to. A thread keeps the turn for one step. Whenever it
leaves, with its answers or with an error, it wakes one that waits. So there is no thread of its
own, and a caller who is alone pays for a few operations on dicts with each step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput, request_output
from quire.engine.sequence import Request
from quire.errors import EngineFailed, QuireError, in_one_sentence

log = logging.getLogger("quire")

CLOSED = "This LLM is closed; make a new one."
INSIDE_A_STEP = (
    "This thread is in the middle of a step of this LLM, which was called again from a signal "
    "handler or a finalizer; call it from another thread."
)
LOOK_AGAIN_S = 1.0  # an interrupt can strike anywhere, even where a thread was about to wake others

T = TypeVar("T")


class Waiter:
    """A thread that waits for its turn, or for what other threads' steps bring."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # A lock as a flag: no code of Python's runs in it, so that finalizers may wake, too.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it has been woken already
            self._asleep.release()

    def wait(self) -> None:
        """Until it is woken, or was since the last call."""
        self._asleep.acquire(timeout=LOOK_AGAIN_S)


class Command(Waiter, Generic[T]):
    """Something to do with the engine between two steps, by the thread whose turn it is."""

    def __init__(self, do: Callable[[Engine], T]) -> None:
        super().__init__()
        self._do = do
        self._result: list[T] = []
        self.error: QuireError | None = None

    @property
    def is_done(self) -> bool:
        return bool(self._result) or self.error is not None

    def run(self, engine: Engine | None) -> None:
        try:
            if engine is None:
                raise QuireError(CLOSED)
            self._result.append(self._do(engine))
        except QuireError as error:  # it is for the thread that gave the command
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
    """The outputs of one call's requests: of each the latest, so that it stays small unread."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__()
        self.requests = requests
        self.num_unfinished = len(requests)
        self.outputs: dict[str, RequestOutput] = {}  # by request
        self.submission: Command[None] | None = None


class SharedEngine:
    """The engine is touched in turns. What other threads read and write (the turn, who waits, the
    commands, the outputs) are dicts and deques, and each access is one operation that is atomic."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._close_engine = weakref.finalize(self, engine.close)  # also of one that nobody closes
        # Empty or with one entry, its holder. `setdefault` takes it and says so at once: no
        # interrupt can come between, as it can with a lock.
        self._turn: dict[str, Waiter] = {}
        self._waiting: dict[Waiter, None] = {}
        self._commands: deque[Command[Any]] = deque()
        self._open: dict[str, tuple[Request, Inbox]] = {}  # touched in turns, as the engine is
        self._failure: EngineFailed | None = None
        self._has_broken_off = False  # a step or a command: true while they are under way
        self._is_closing = False
        self.num_generated_tokens = engine.commit.num_generated_tokens

    @property
    def engine(self) -> Engine:
        """For what does not change while it steps."""
        engine = self._engine
        if engine is None or self._is_closing:
            raise QuireError(CLOSED)
        return engine

    # --- calls ----------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, requests: list[Request]) -> Iterator[Inbox]:
        """Start requests, whose outputs land in the inbox; whatever is unfinished is aborted.

        The end may come in any thread and at any moment, where a generator is collected: it only
        leaves a command, which is run before the engine is next used.
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
        """Take a step, or wait until another thread's has brought something. Call it until the
        inbox has what it should; who then does something else meanwhile has to `hand_over`."""
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
        """Let a thread that waits take the steps, if none does."""
        if not self._turn:
            with suppress(KeyError):  # none waits
                self._waiting.popitem()[0].wake()

    def between_steps(self, do: Callable[[Engine], T]) -> T:
        """What `do` returns, called while no step is under way."""
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
        """Let go of the engine after the step that is under way. Open calls end with an error."""
        self._is_closing = True
        for waiter in list(self._waiting):
            waiter.wake()
        with suppress(QuireError):  # another thread has closed it
            self.between_steps(self._end)

    # --- turns ----------------------------------------------------------------------------------

    def _take_turn(self, waiter: Waiter) -> bool:
        """Whether it is this thread's turn; if not, it has waited until something is different."""
        self._waiting[waiter] = None  # first, so that a thread which leaves right now sees it
        holder = self._turn.setdefault("holder", waiter)
        if holder is waiter:
            return True
        if holder.thread == waiter.thread:
            raise QuireError(INSIDE_A_STEP)
        waiter.wait()
        return False

    def _end_turn(self, waiter: Waiter) -> None:
        """Also of one that has none, and as often as one likes."""
        self._waiting.pop(waiter, None)
        if self._turn.get("holder") is waiter:
            del self._turn["holder"]

    def check(self, inbox: Inbox | None = None) -> None:
        """Raise what has ended this call, if anything has."""
        if self._is_closing:
            raise QuireError(CLOSED)
        if self._failure is not None:
            raise EngineFailed(str(self._failure))
        if inbox is not None and inbox.submission is not None and inbox.submission.error:
            raise inbox.submission.error

    # --- in turn --------------------------------------------------------------------------------

    def _run_commands(self) -> None:
        if self._has_broken_off:
            self._put_right()
        self._has_broken_off = True
        while self._commands:
            self._commands[0].run(self._engine)
            self._commands.popleft()  # after that: if it is interrupted, another thread does it
        self._has_broken_off = False

    def _put_right(self) -> None:
        """After an interrupt, which may have struck anywhere in the engine, and before outputs were
        delivered: of each request that has ended the engine tells only once."""
        engine = self._engine
        if engine is None or self._failure is not None:
            return
        engine.begin_again()
        for request, _ in list(self._open.values()):
            if request.finished:
                engine.abort_request(request.id)
                self._deliver(request_output(request, engine.model.tokenizer))

    def _submit(self, inbox: Inbox, engine: Engine) -> None:
        for request in inbox.requests:
            if engine.find_request(request.id) is None:  # else an interrupt came in between
                engine.submit(request)
            self._open[request.id] = request, inbox

    def _abort(self, request_ids: list[str], engine: Engine) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            engine.abort_request(request_id)

    def _step(self) -> None:
        assert self._engine is not None
        self._has_broken_off = True
        try:
            for output in self._engine.step():
                self._deliver(output)
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
        self.num_generated_tokens = self._engine.commit.num_generated_tokens

    def _deliver(self, output: RequestOutput) -> None:
        if (found := self._open.get(output.request_id)) is not None:
            _, inbox = found
            if output.finished:
                inbox.num_unfinished -= 1
            inbox.outputs[output.request_id] = output
            if output.finished:
                del self._open[output.request_id]
            inbox.wake()

    def _end(self, engine: Engine) -> None:
        self._engine = None
        self._open.clear()
        self._close_engine()
