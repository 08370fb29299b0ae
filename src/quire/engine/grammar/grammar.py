"""One form of output: its compiled matcher once there is one, and what it takes of memory."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

LEAST_BYTES = 256 << 10  # of a grammar: what a trial does not see, such as memory used again
BYTES_PER_TOKEN = 32 << 10  # by which a grammar grows at worst as texts follow it, …
MOST_GROWTH = 24 << 20  # … until its lexer has all the states it may have


class Grammar:
    """A form of output, while it is compiled and after."""

    def __init__(self, form: StructuredOutput) -> None:
        self.form = form
        self.has_begun = False  # to be compiled
        self.num_wanted = 0  # requests that wait for it, or did
        self.is_worn_out = False  # its lexer has no room left: the next request has a new one
        self.is_final = True  # whether compiling it again would end the same way
        self.num_followed = 0  # tokens of all texts
        self._num_bytes = 0
        self._matcher: Future[LLMatcher] = Future()

    @property
    def is_wanted(self) -> bool:
        return self.num_wanted > 0

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

    def new_matcher(self) -> LLMatcher:
        """A matcher of its own for a sequence without output; waits until there is one."""
        return self._matcher.result().deep_copy()

    @property
    def num_bytes(self) -> int:
        """What it takes: as measured when it was tried, and as its lexer may have grown since."""
        text = sum(len(str(value)) for value in self.form.as_dict().values())
        grown = min(self.num_followed * BYTES_PER_TOKEN, MOST_GROWTH)
        return max(self._num_bytes, LEAST_BYTES) + text + grown

    def succeed(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._matcher.set_result(matcher)

    def fail(self, error: str, is_final: bool = True) -> None:
        self.is_final = is_final
        self._matcher.set_exception(RequestError(error))
