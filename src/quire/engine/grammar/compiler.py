"""Compiles grammars beside the engine's loop, and keeps those that may be asked for again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from quire.engine.grammar.source import cannot_be_used, grammar_text
from quire.engine.grammar.state import GrammarState
from quire.engine.grammar.vocabulary import Vocabulary
from quire.errors import RequestError
from quire.models.tokenizer import Tokenizer
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

THREADS = 2
MOST_KEPT = 128  # compiled grammars; each is a few hundred kilobytes
MOST_KEPT_CHARS = 4 * 1024 * 1024  # … and what they were compiled from


def limits() -> LLParserLimits:
    """What one grammar may cost, whatever is in it.

    Compiling takes a second or two at the most; a mask tens of milliseconds, and mostly hundredths
    of one; and a running grammar tens of megabytes: about a kilobyte for each state of its lexer.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Grammar:
    """A form of output, while it is compiled and after."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self._matcher = matcher

    @property
    def is_done(self) -> bool:
        return self._matcher.done()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done, or the time is over."""
        wait([self._matcher], timeout)

    @property
    def error(self) -> str | None:
        """Why it cannot be used; waits until that is known."""
        error = self._matcher.exception()
        return None if error is None else str(error)

    def check(self) -> None:
        """Raise RequestError if it cannot be used; waits until that is known."""
        if (error := self.error) is not None:
            raise RequestError(error)

    def new_state(self) -> GrammarState:
        """For a sequence without output."""
        return GrammarState(self._matcher.result().deep_copy())


class GrammarCompiler:
    """One model's grammars. Nothing here waits; threads start with the first grammar."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._kept_chars = 0

    def prepare(self) -> Future[None]:
        """Read the vocabulary now, so that the first request does not have to wait for it."""
        return self._pool().submit(self._prepare)

    def compile(self, form: StructuredOutput) -> Grammar:
        """Begin to compile, unless it is known."""
        if self._tokenizer is None:
            raise RequestError(
                "This model has no tokenizer, which structured output needs; leave structured out."
            )
        grammar = self._kept.pop(form, None)
        if grammar is None:
            grammar = Grammar(self._pool().submit(self._compile, form))
            self._kept_chars += _size(form)
        self._kept[form] = grammar
        while len(self._kept) > MOST_KEPT or self._kept_chars > MOST_KEPT_CHARS:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_chars -= _size(oldest)
        return grammar

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quire-grammar")
        return self._threads

    def _prepare(self) -> None:
        with self._lock:
            if self._vocabulary is None and self._tokenizer is not None:
                vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                vocabulary.guided()
                self._vocabulary = vocabulary

    def _compile(self, form: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        self._prepare()
        assert self._vocabulary is not None
        guided = self._vocabulary.guided()
        matcher = LLMatcher(guided, grammar_text(form), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars show only here that they are too large
        if matcher.is_error():
            raise cannot_be_used(form, matcher.get_error())
        return matcher


def _size(form: StructuredOutput) -> int:
    return sum(len(str(value)) for value in form.as_dict().values())
