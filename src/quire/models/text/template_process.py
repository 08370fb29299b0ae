"""The process in which chat templates run, with a bound on time, memory and the text they make.

A template is a program that comes with a model, whose author is not trusted: `{{ 'a' * 10**10 }}`,
or loops in loops. No check of its text tells what it will take, and Python cannot bound a part of a
process. So one process of little memory renders all conversations, one after the other. The system
ends it when a template takes too long; the next conversation gets another.

    parent ── {"template", "values"} ──► child      frames of JSON (`quire.framing`)
           ◄── {"text"} or {"error"} ──
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

from quire.framing import pack, read_frame_from

MOST_SECONDS = 5.0  # of the CPU, for one conversation: thousands of messages take a tenth of one
MOST_MEMORY = 1 << 30
MOST_TEXT = 1 << 26  # characters
TOO_MUCH_MEMORY = "it takes too much memory"
TOO_MUCH_TEXT = f"it makes more than {MOST_TEXT:,} characters"

# Not `-m`: with it Python looks for modules in the folder that the user stands in, which may be
# the model's.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from quire.models.text.template_process import serve; serve(float(sys.argv[2]))"
)


class TemplateProcess:
    """As its parent sees it. Several threads may ask; each waits for the one before."""

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def render(self, template: str, values: dict[str, Any]) -> dict[str, str]:
        """`text`, or `error` with a reason; a TypeError or ValueError if `values` is not JSON."""
        request = pack({"template": template, "values": values})
        with self._lock:
            answer = self._ask(request) or self._ask(request)  # it may have died while it was idle
        return answer or {"error": "the process that renders it was ended"}

    def _ask(self, request: bytes) -> dict[str, str]:
        """The child's answer; nothing if it ended, and not for the time it took."""
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(request)
            child.stdin.flush()
            answer: dict[str, str] = json.loads(read_frame_from(child.stdout))
        except (EOFError, BrokenPipeError):
            self._child = None
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # it would still like to write the request
                    pipe.close()
            if child.wait() != -signal.SIGPROF:
                return {}
            return {"error": f"it takes more than {self._most_seconds:g} seconds"}
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        path = json.dumps([entry for entry in sys.path if entry])
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, path, str(self._most_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._child

    def _forget(self) -> None:
        """After a fork: the child is the other process's, and two must not talk to it."""
        child, self._child, self._lock = self._child, None, threading.Lock()
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    os.close(pipe.fileno())  # type: ignore[union-attr]
            child.returncode = 0  # nothing to wait for


def serve(most_seconds: float) -> None:
    """The child: answer until the parent closes its end, as it does when it ends itself."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    with suppress(EOFError, BrokenPipeError):
        while True:
            request = read_frame_from(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_PROF, most_seconds)  # SIGPROF ends the process
            answer = _answer(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(pack(answer))
            sys.stdout.buffer.flush()
            if answer.get("error") == TOO_MUCH_MEMORY:
                return  # what memory it has left may be in pieces; the next process has all


def _answer(request: bytes) -> dict[str, str]:
    from jinja2 import TemplateSyntaxError

    try:
        asked = json.loads(request)
        text = _compiled(asked["template"]).render(asked["values"])
    except TemplateSyntaxError as error:
        return {"broken": str(error)}
    except MemoryError:
        return {"error": TOO_MUCH_MEMORY}
    except Exception as error:  # a program can fail in any way
        return {"error": str(error) or type(error).__name__}
    return {"text": text} if len(text) <= MOST_TEXT else {"error": TOO_MUCH_TEXT}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from quire.models.text.template_environment import template_environment

    return template_environment().from_string(template)
