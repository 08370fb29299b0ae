"""Compiles many kernels at once: a run in which they are only asked for, and none is launched."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode

from quire.kernels.triton.tried import forget_trials


class _NotCompiledYet:
    """Stands for a kernel; what is launched is nothing."""

    function = None
    packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


class _Asked(NamedTuple):
    """A kernel that was asked for, and what Triton does when it is compiled, or cannot be."""

    compiled: Future[Any]
    finalize: Callable[[Any], None]
    cleanup: Callable[[Any], None] | None  # None: this version puts nothing in its place
    stands_for_it: _NotCompiledYet


class DryRun(AsyncCompileMode):
    """Inside, in this thread, a kernel that was never compiled is handed to others that compile it.

    Its caller goes on at once, with results that mean nothing. All are compiled at the end. Kernels
    that were compiled before are launched, and must not be led astray by such results: that is why
    a process has one dry run, before anything else.
    """

    _number = 0

    @classmethod
    def is_first(cls) -> bool:
        return cls._number == 0

    def __init__(self) -> None:
        type(self)._number += 1
        device = torch.cuda.current_device()
        self._threads = ThreadPoolExecutor(
            os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)
        )
        self._compiled: dict[str, Future[Any]] = {}
        self._asked: list[_Asked] = []
        super().__init__(self._threads)

    def submit(
        self, key: str, compile_fn: Any, finalize_fn: Any, cleanup_fn: Any = None, *_: Any
    ) -> _NotCompiledYet:
        if key not in self._compiled:
            self._compiled[key] = self._threads.submit(_make, compile_fn)
        asked = _Asked(self._compiled[key], finalize_fn, cleanup_fn, _NotCompiledYet())
        self._asked.append(asked)
        return asked.stands_for_it

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        try:
            for asked in self._asked:
                if asked.compiled.exception() is None:
                    asked.finalize(asked.compiled.result())
                    continue
                if asked.cleanup is not None:
                    asked.cleanup(asked.stands_for_it)
                forget_trials()  # a real step says what is wrong, or goes another way
        finally:
            self._threads.shutdown(cancel_futures=True)


def _make(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    _ = kernel.run  # made when it is first asked for: older Tritons run a C compiler for it
    return kernel
