"""Compiles grammars beside the engine's loop, and keeps those that may be asked for again.

    compile ─► CompileQueue ─► a thread: the sandbox tries it ─► the thread compiles it ─► kept

`llguidance` cannot be stopped, and nothing that it has compiled can be moved to another process. So
each form is tried first in a process that the kernel ends if it takes too long or too much memory,
and only one that has passed is compiled here: the same work again, which is known to be small now.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.matcher import new_matcher
from quire.engine.grammar.queue import CompileQueue
from quire.engine.grammar.sandbox import Sandbox, SandboxFailed
from quire.engine.grammar.source import cannot_be_used
from quire.engine.grammar.vocabulary import Vocabulary
from quire.errors import QuireError, RequestError
from quire.models.text.tokenizer import Tokenizer
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("quire")

THREADS = 2  # each has a sandbox
MOST_KEPT = 128  # compiled grammars
MOST_KEPT_BYTES = 256 << 20  # … and what they take, as far as that is known
MOST_LIVING_BYTES = 1 << 30  # with those of running requests; at that, new ones wait
ROOM_S = 0.1  # how often a thread looks whether running requests have left room
UNWANTED = "The request for this form was abandoned."
CLOSED = "The engine has been closed."
ENDED = "The process that compiles grammars was ended from outside; try again."
STOP_S = 10.0  # for compiling what has been tried, which is a matter of a few seconds


class GrammarCompiler:
    """One model's grammars. Nothing here waits; threads start with the first grammar."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._changed = threading.Condition()  # holds what follows
        self._queue = CompileQueue()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._living: weakref.WeakSet[Grammar] = weakref.WeakSet()  # compiled, kept or in use
        self._sandboxes: dict[threading.Thread, Sandbox] = {}
        self._num_idle = 0  # threads that wait for something to compile
        self._is_closed = False

    def prepare(self) -> None:
        """Read the vocabulary and start a sandbox now, so that the first request need not."""
        with self._changed:
            self._add_thread()

    def compile(self, form: StructuredOutput, tenant: str = "") -> Grammar:
        """Begin to compile, unless it is known."""
        if self._tokenizer is None:
            raise RequestError(
                "This model has no tokenizer, which structured output needs; leave structured out."
            )
        with self._changed:
            grammar = self._kept.pop(form, None)
            if grammar is None or grammar.is_worn_out or not grammar.is_final:
                grammar = Grammar(form)
            self._kept[form] = grammar
            grammar.num_wanted += 1
            if self._is_closed and not grammar.is_done:
                grammar.fail(CLOSED, is_final=False)
            elif not grammar.is_done:
                self._queue.add(tenant, grammar)
                self._add_thread()
                self._changed.notify()
            self._trim()
        return grammar

    def abandon(self, grammar: Grammar) -> None:
        """One request less waits for it. When none does, it is compiled no further."""
        with self._changed:
            grammar.num_wanted -= 1
            if grammar.is_wanted or grammar.is_done:
                return
            if self._kept.get(grammar.form) is grammar:
                del self._kept[grammar.form]
            if not grammar.has_begun:
                grammar.fail(UNWANTED, is_final=False)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while (taken := self._queue.take()) is not None:
                taken[1].fail(CLOSED, is_final=False)
        for sandbox in self._sandboxes.values():
            sandbox.close()
        for thread in self._sandboxes:
            thread.join(STOP_S)

    # --- what is kept -------------------------------------------------------------------------

    def _trim(self) -> None:
        """Let go of those that were asked for the longest time ago; the requests have their own."""
        while len(self._kept) > MOST_KEPT or self._bytes(self._kept.values()) > MOST_KEPT_BYTES:
            if len(self._kept) == 1:
                return  # the one that is asked for now
            self._kept.popitem(last=False)

    @staticmethod
    def _bytes(grammars: Iterable[Grammar]) -> int:
        return sum(grammar.num_bytes for grammar in grammars if grammar.is_done)

    @property
    def _has_room(self) -> bool:
        return self._bytes(self._living) <= MOST_LIVING_BYTES

    # --- the threads --------------------------------------------------------------------------

    def _add_thread(self) -> None:
        """If all are busy, and there are fewer than there may be."""
        if self._is_closed or self._num_idle or len(self._sandboxes) == THREADS:
            return
        sandbox = Sandbox()
        thread = threading.Thread(
            target=self._run, args=(sandbox,), name="quire-grammar", daemon=True
        )
        self._sandboxes[thread] = sandbox
        thread.start()

    def _run(self, sandbox: Sandbox) -> None:
        with suppress(Exception):  # the first grammar that is asked for says it
            self._ready(sandbox)
        while self._run_one(sandbox):
            pass  # and hold on to nothing of it
        sandbox.end()

    def _run_one(self, sandbox: Sandbox) -> bool:
        """Waits for a grammar to compile; False when the engine ends."""
        taken = self._next()
        if taken is None:
            return False
        tenant, grammar = taken
        try:
            self._compile(grammar, sandbox)
        except SandboxFailed as error:
            log.warning("%s", error)
            grammar.fail(CLOSED if self._is_closed else ENDED, is_final=False)
        except QuireError as error:
            grammar.fail(str(error))
        except Exception:
            log.exception("A grammar could not be compiled.")
            grammar.fail(str(cannot_be_used(grammar.form, "the compiler failed")))
        with self._changed:
            self._queue.done(tenant)
        return True

    def _next(self) -> tuple[str, Grammar] | None:
        with self._changed:
            while not self._is_closed:
                if self._has_room and (taken := self._queue.take()) is not None:
                    return taken
                self._num_idle += 1
                self._changed.wait(None if self._has_room else ROOM_S)
                self._num_idle -= 1
        return None

    def _compile(self, grammar: Grammar, sandbox: Sandbox) -> None:
        guided = self._ready(sandbox)
        verdict = sandbox.try_form(grammar.form, lambda: grammar.is_wanted)
        if verdict is None:
            grammar.fail(UNWANTED, is_final=False)
            return
        if verdict.error is not None:
            raise RequestError(verdict.error)
        matcher = new_matcher(guided, verdict.grammar)
        if matcher.is_error():
            raise cannot_be_used(grammar.form, matcher.get_error())
        with self._changed:
            grammar.succeed(matcher, verdict.num_bytes)
            self._living.add(grammar)
            self._trim()

    def _ready(self, sandbox: Sandbox) -> LLTokenizer:
        """What grammars are compiled against, here and in the sandbox, which runs then."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                assert self._tokenizer is not None
                ends = self._eos_token_ids
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, ends)
            if not sandbox.is_running:
                sandbox.start(self._vocabulary.to_plain())  # it reads while the next line does
            return self._vocabulary.guided()
