"""The process in which forms are tried: `python -m quire.engine.grammar.sandbox_process`.

    to it     {"tokens": […], "eos": […], "special": […], "bos": …}, once; then a form for each line
    from it   {}, when it is ready; then for each form one of
              {"grammar": "its text for llguidance", "num_bytes": 123456}
              {"error": "a sentence"}
              {"died": "of what"}     it took too long, too much memory, or crashed

Every form has a fork of its own under the kernel's limits, so that nothing a form does outlasts it,
and the vocabulary is read only once. SIGUSR1 ends the form that is being tried. The process ends
when its input does. It imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from quire.engine.grammar.matcher import new_matcher
from quire.engine.grammar.source import cannot_be_used, grammar_text
from quire.errors import RequestError
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# What compiling one form may take. A usual schema takes some milliseconds and two megabytes.
CPU_S = 2.0
WALL_S = 20.0
MOST_BYTES = 64 << 20
# Less than any thread of the engine has, so that what fits here fits there, too.
STACK_BYTES = 1 << 20

OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM)
OUT_OF_MEMORY = 3  # exit status of a fork to which Python has said so
PAGE = resource.getpagesize()


class Words:
    """A vocabulary by the attributes that `LLTokenizer` asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.tokens = [token.encode("latin-1") for token in plain["tokens"]]
        self.eos_token_ids = plain["eos"]
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = plain["bos"]
        self.special_token_ids = plain["special"]
        self._guided: LLTokenizer | None = None

    def guided(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._guided is None:
            wrapper: Any = self
            self._guided = LLTokenizer(
                wrapper, n_vocab=len(self.tokens), eos_token=self.eos_token_ids
            )
        return self._guided

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode()
        return self.guided().greedy_tokenize(plain)


class Forks:
    """Tries one form at a time, each in a fork."""

    def __init__(self, guided: LLTokenizer) -> None:
        self._guided = guided
        self._fork: int | None = None

    def end(self, *_: object) -> None:
        """A signal's handler."""
        if self._fork:
            os.kill(self._fork, signal.SIGKILL)

    def run(self, form: StructuredOutput) -> bytes:
        """The line to answer."""
        near, far = os.pipe()
        self._fork = os.fork()
        if not self._fork:
            self._run_in_fork(form, far)
        os.close(far)
        with open(near, "rb") as pipe:
            answer = pipe.read()
        fork, self._fork = self._fork, None  # from here on its number may be another's
        _, status = os.waitpid(fork, 0)
        code = os.waitstatus_to_exitcode(status)
        return answer if code == 0 else _line({"died": _reason(code)})

    def _run_in_fork(self, form: StructuredOutput, pipe: int) -> NoReturn:
        code = 1
        try:
            before = _own_bytes()
            _limit()
            answer = try_form(form, self._guided)
            answer["num_bytes"] = max(0, _own_bytes() - before)
            with open(pipe, "wb") as file:
                file.write(_line(answer))
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)


def try_form(form: StructuredOutput, guided: LLTokenizer) -> dict[str, Any]:
    try:
        grammar = grammar_text(form)
    except RequestError as error:
        return {"error": str(error)}
    matcher = new_matcher(guided, grammar)
    if matcher.is_error():
        return {"error": str(cannot_be_used(form, matcher.get_error()))}
    return {"grammar": grammar}


def _limit() -> None:
    """The kernel ends a process that takes more; no code of its own has to run for that."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)


def _own_bytes() -> int:
    """Resident memory that is not a file's."""
    with open("/proc/self/statm") as file:
        resident, of_files = file.read().split()[1:3]
    return (int(resident) - int(of_files)) * PAGE


def _reason(code: int) -> str:
    if -code in OUT_OF_TIME:
        return f"it takes more than {CPU_S:.0f} s to compile"
    if code in (OUT_OF_MEMORY, -signal.SIGABRT):  # the second is how Rust ends without memory
        return f"it takes more than {MOST_BYTES >> 20} MiB to compile"
    return "it is nested too deeply to compile" if code == -signal.SIGSEGV else "it is too complex"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def main() -> None:
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    forks = Forks(Words(json.loads(lines.readline())).guided())
    signal.signal(signal.SIGUSR1, forks.end)
    out.write(_line({}))
    out.flush()
    for line in lines:
        out.write(forks.run(StructuredOutput(**json.loads(line))))
        out.flush()


if __name__ == "__main__":
    main()
