"""What the compiler is told of a kernel, and the types that a kernel's arguments have."""

from __future__ import annotations

from typing import Any, NamedTuple, NewType

# `Elements` points to numbers of the tensors' own type. No `Real` follows another: each field is
# packed into eight bytes, and two float32 would share them.
Count = NewType("Count", int)
Real = NewType("Real", float)
Elements = NewType("Elements", int)
Floats = NewType("Floats", int)
Int32s = NewType("Int32s", int)
Int64s = NewType("Int64s", int)
Bytes = NewType("Bytes", int)
Kind = NewType("Kind", int)  # no value: a type with a name of the kernel's own


class KernelSource(NamedTuple):
    """The fields are those of `Kernel`."""

    function: str
    arguments: type
    fields: dict[str, Any]
    kind: str
