"""The compiler of kernels: Numba, which a process that finds them compiled does not import."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from llvmlite import ir
from numba import config, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from quire.kernels.numba.code.memory import helper
from quire.kernels.numba.host import cpu_features, is_arm_linux
from quire.kernels.numba.machine_code import MachineCode
from quire.kernels.numba.source import (
    Bytes,
    Count,
    Elements,
    Floats,
    Int32s,
    Int64s,
    KernelSource,
    Kind,
    Real,
)

if is_arm_linux() and not config.CPU_FEATURES:  # before anything is compiled
    config.CPU_FEATURES = cpu_features()

ENTRY = "kernel"

ELEMENTS = {torch.float32: types.float32, torch.bfloat16: types.uint16}

COMPILED_TYPES: dict[Any, types.Type] = {
    Count: types.int64,
    Real: types.float32,
    Floats: types.CPointer(types.float32),
    Int32s: types.CPointer(types.int32),
    Int64s: types.CPointer(types.int64),
    Bytes: types.CPointer(types.uint8),
}


@global_compiler_lock  # type: ignore[untyped-decorator]
def compile_kernel(kernel: KernelSource, dtype: torch.dtype) -> MachineCode:
    kinds = COMPILED_TYPES | {
        Elements: types.CPointer(ELEMENTS[dtype]),
        Kind: types.Opaque(kernel.kind),
    }
    seen = types.NamedTuple([kinds[kind] for kind in kernel.fields.values()], kernel.arguments)
    pointer = types.CPointer(seen)
    module, _, name = kernel.function.rpartition(".")
    function = helper(getattr(import_module(f"quire.kernels.numba.code.{module}"), name))
    with _left_as_it_is():
        function.compile(types.void(pointer))
    library = _with_entry(function.overloads[(pointer,)], pointer)
    _check_calls(library._final_module)
    return MachineCode(ENTRY, library._get_compiled_object())


@contextmanager
def _left_as_it_is() -> Iterator[None]:
    """Numba would optimise each function with all that it calls, and all of it again with its
    caller, which takes a quarter of the time to compile the kernels. Once, with the entry, does."""
    level = config.OPT
    config.OPT = type(level)(0)
    try:
        yield
    finally:
        config.OPT = level


def _with_entry(compiled: Any, pointer: types.Type) -> Any:
    """A function as C calls it. Numba's own would show errors by Python's means, which the code
    would then need; kernels have no errors."""
    context = cpu_target.target_context
    library = context.codegen().create_library(ENTRY)
    library.enable_object_caching()
    library.add_linking_library(compiled.library)
    module = library.create_ir_module(ENTRY)
    kind = ir.FunctionType(ir.VoidType(), [context.get_value_type(pointer)])
    entry = ir.Function(module, kind, ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    inner = context.declare_function(module, compiled.fndesc)
    context.call_conv.call_function(builder, inner, types.none, (pointer,), entry.args)
    builder.ret_void()
    library.add_ir_module(module)
    library.finalize()
    return library


def _check_calls(module: Any) -> None:
    """Other processes, without Numba, have to find what the code calls: LLVM would end them."""
    process = ctypes.CDLL(None)
    for function in module.functions:
        if function.is_declaration and not function.name.startswith("llvm."):
            getattr(process, function.name)  # raises AttributeError, which names it
