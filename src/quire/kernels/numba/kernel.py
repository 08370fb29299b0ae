"""From a Python function over raw memory to one that torch's own threads run.

A kernel gets a pointer to its arguments and nothing else. Each thread that enters claims one piece
of work after another until none is left. So a kernel is right with any number of threads, and no
pool but torch's is needed: a second one would fight with it for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, get_type_hints

import torch
from numba import cfunc, types

# The types of a kernel's arguments. `Elements` points to numbers of the tensors' own type. No
# `Real` follows another: each field is packed into eight bytes, and two float32 would share them.
Count = NewType("Count", int)
Real = NewType("Real", float)
Elements = NewType("Elements", int)
Floats = NewType("Floats", int)
Int32s = NewType("Int32s", int)
Int64s = NewType("Int64s", int)
Bytes = NewType("Bytes", int)
Version = NewType("Version", int)

ELEMENTS = {torch.float32: types.float32, torch.bfloat16: types.uint16}


def _version() -> types.Type:
    """A type named after these sources. As a part of what a kernel is compiled for, it keeps one
    that was compiled from others, and cached, from being used: Numba itself looks at one file."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return types.Opaque(f"Version_{hashlib.sha256(sources).hexdigest()[:16]}")


COMPILED_TYPES: dict[Any, types.Type] = {
    Count: types.int64,
    Real: types.float32,
    Floats: types.CPointer(types.float32),
    Int32s: types.CPointer(types.int32),
    Int64s: types.CPointer(types.int64),
    Bytes: types.CPointer(types.uint8),
    Version: _version(),
}


class _Packed(threading.local):
    """Where arguments are packed for a call; each Python thread has a place of its own."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        layout = "".join("f4x" if kind is Real else "q" for kind in kinds if kind is not Version)
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

    `arguments` is a class of named fields: what the function sees there. `others` are types of some
    of them that this kernel has instead, `own_types` compiled types that no other kernel has.
    """

    def __init__(
        self,
        function: Callable[[Any], None],
        arguments: type,
        own_types: Mapping[Any, types.Type] = MappingProxyType({}),
        **others: Any,
    ) -> None:
        self.function = function
        self.own_types = own_types
        self.fields = get_type_hints(arguments) | others
        self.arguments = arguments
        self._local = _Packed(self.fields.values())
        self._compiled: dict[torch.dtype, tuple[int, Callable[[int], None]]] = {}

    def __call__(self, dtype: torch.dtype, threads: int, *values: float) -> None:
        """`values` are the fields in order, but for the last one, the version."""
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
        kinds = COMPILED_TYPES | {Elements: types.CPointer(ELEMENTS[dtype]), **self.own_types}
        seen = types.NamedTuple([kinds[kind] for kind in self.fields.values()], self.arguments)
        address = _compile(self.function, types.void(types.CPointer(seen)))
        self._compiled[dtype] = address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        return self._compiled[dtype]


def _compile(function: Callable[[Any], None], signature: Any) -> int:
    try:
        return int(cfunc(signature, cache=True, error_model="numpy")(function).address)
    except Exception:  # a cache that is damaged or has no place on disk: then without it
        return int(cfunc(signature, error_model="numpy")(function).address)


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
