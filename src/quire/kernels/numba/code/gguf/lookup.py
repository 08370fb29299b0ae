"""Bytes out of a table of sixteen, by an instruction that shuffles bytes where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quire.kernels.numba.code.gguf.dot import has_feature
from quire.kernels.numba.code.gguf.reader import constant

ENTRIES = 16  # of a table: the bytes of the shortest register
X86 = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
NEEDS = {16: "ssse3", 32: "avx2", 64: "avx512bw"}


def look_up(builder: ir.IRBuilder, indices: Any, entries: Sequence[int]) -> Any:
    """Of each byte, which is 0 to 15, the entry that it names."""
    kind = indices.type
    table = kind([entry % 256 for entry in entries] * (kind.count // ENTRIES))
    if kind.count in NEEDS and has_feature(NEEDS[kind.count]):
        return _call(builder, f"llvm.x86.{X86[kind.count]}", table, indices)
    if kind.count == ENTRIES and has_feature("dotprod"):
        return _call(builder, "llvm.aarch64.neon.tbl1.v16i8", table, indices)
    return _select(builder, indices, entries)


def _call(builder: ir.IRBuilder, name: str, table: Any, indices: Any) -> Any:
    kind = ir.FunctionType(indices.type, (indices.type,) * 2)
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, (table, indices))


def _select(builder: ir.IRBuilder, indices: Any, entries: Sequence[int]) -> Any:
    """One of the halves of `entries` by the highest bit that tells them apart, and so on."""
    kind = indices.type
    if len(entries) == 1:
        return constant(kind, entries[0] % 256)
    half = len(entries) // 2
    bit = builder.and_(indices, constant(kind, half))
    is_set = builder.icmp_unsigned("!=", bit, constant(kind, 0))
    lower, upper = (_select(builder, indices, each) for each in (entries[:half], entries[half:]))
    return builder.select(is_set, upper, lower)
