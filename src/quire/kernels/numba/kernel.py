"""From a Python function over raw memory to one that torch's own threads run.

A kernel gets a pointer to its arguments and nothing else. Each thread that enters claims one piece
of work after another until none is left. So a kernel is right with any number of threads, and no
pool but torch's is needed: a second one would fight with it for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from quire.kernels.numba import machine_code
from quire.kernels.numba.source import KernelSource, Real

DTYPES = (torch.float32, torch.bfloat16)

log = logging.getLogger("quire")


class _Packed(threading.local):
    """Where arguments are packed for a call; each Python thread has a place of its own."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        layout = "".join("f4x" if kind is Real else "q" for kind in kinds)
        self.pack = struct.Struct(f"@{layout}").pack_into
        self.memory = ctypes.create_string_buffer(8 * (len(layout) + 1))
        self.address = ctypes.addressof(self.memory)


class Launch(NamedTuple):
    address: int
    arguments: bytes


class _Launches(threading.local):
    """Where this thread's launches are noted, while a pass is recorded."""

    def __init__(self) -> None:
        self.noted: list[Launch] | None = None

    @contextmanager
    def noted_in(self, noted: list[Launch]) -> Iterator[None]:
        self.noted = noted
        try:
            yield
        finally:
            self.noted = None


launches = _Launches()


class Kernel:
    """A function of its arguments' address, compiled once for each type of tensor.

    `function` is its place in `code/`. `arguments` is a class of named fields: what the function
    sees there. `kind` names the type of a field that is a `Kind`, and `others` are types of some
    fields that this kernel has instead.
    """

    def __init__(self, function: str, arguments: type, kind: str = "", **others: Any) -> None:
        fields = get_type_hints(arguments) | others
        self._source = KernelSource(function, arguments, fields, kind)
        self._name = "-".join(
            (function, *filter(None, [kind]), *(f"{k}={v.__name__}" for k, v in others.items()))
        )
        self._local = _Packed(fields.values())
        self._compiled: dict[torch.dtype, tuple[int, Callable[[int], None]]] = {}
        self._compiling = threading.Lock()

    def __call__(self, dtype: torch.dtype, threads: int, *values: float) -> None:
        """`values` are the fields in order."""
        packed = self._local
        packed.pack(packed.memory, 0, *values)
        address, on_this_thread = self._compiled.get(dtype) or self.compile(dtype)
        if launches.noted is not None:
            launches.noted.append(Launch(address, packed.memory.raw))
        if threads > 1 and PARALLEL is not None:
            PARALLEL(address, packed.address, threads, 0)
        else:
            on_this_thread(packed.address)

    def compile(self, dtype: torch.dtype) -> tuple[int, Callable[[int], None]]:
        """Have it for tensors of this type: as an earlier process compiled it, or compiled now."""
        with self._compiling:
            if dtype not in self._compiled:
                address = self._code(dtype).load()
                self._compiled[dtype] = address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
            return self._compiled[dtype]

    def _code(self, dtype: torch.dtype) -> machine_code.MachineCode:
        name = f"{self._name}-{str(dtype).removeprefix('torch.')}"
        code = machine_code.read(name)
        if code is None:
            from quire.kernels.numba.compiler import compile_kernel

            _say_why_it_takes_long()
            code = compile_kernel(self._source, dtype)
            machine_code.keep(name, code)
        return code


def _say_why_it_takes_long() -> None:
    """It is said once: whoever says it never gives the lock back."""
    if _said.acquire(blocking=False):
        log.warning("Kernels are compiled for this CPU, in some 20 s; later processes find them.")


_said = threading.Lock()


class OpenMP(NamedTuple):
    """Of the library that torch uses, `GOMP_parallel(function, argument, threads, flags)`, and the
    addresses of what a thread asks: how many there really are, and for another's turn.

    Without `parallel`, as in libraries for other systems than Linux, kernels run on the calling
    thread.
    """

    parallel: Callable[[int, int, int, int], None] | None = None
    team_size: int = 0
    give_way: int = 0


def _openmp() -> OpenMP:
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # Searched for in what torch itself is linked to.
        functions = torch_cpu.GOMP_parallel, torch_cpu.omp_get_num_threads, torch_cpu.sched_yield
    except (OSError, AttributeError):
        return OpenMP()
    parallel, *others = functions
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return OpenMP(parallel, *(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in others))


OPENMP = _openmp()
PARALLEL = OPENMP.parallel
