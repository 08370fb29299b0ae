"""Bytes out of a table, on machines with and without an instruction for it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from llvmlite import binding, ir
from numba.core.registry import cpu_target

from quire.kernels.numba.code.gguf import lookup
from quire.kernels.numba.code.gguf.dot import bytes_of, register_lanes

ENTRIES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 240)


@pytest.mark.parametrize("has_instruction", [True, False])
def test_each_byte_finds_its_entry(has_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_instruction:
        monkeypatch.setattr(lookup, "has_feature", lambda name: False)
    kind = bytes_of(register_lanes())
    module = ir.Module()
    pointer = kind.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer, pointer]), "find")
    builder = ir.IRBuilder(function.append_basic_block())
    indices = builder.load(function.args[0], align=1)
    found = lookup.look_up(builder, indices, ENTRIES)
    builder.store(found, function.args[1], align=1)
    builder.ret_void()
    assert ("pshuf" in str(module) or "tbl1" in str(module)) <= has_instruction

    numbers = np.arange(kind.count, dtype=np.uint8)[::-1] % 16
    out = np.zeros_like(numbers)
    engine = _compiled(module)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    call(engine.get_function_address("find"))(numbers.ctypes.data, out.ctypes.data)
    assert np.array_equal(out, np.array(ENTRIES, np.int16).astype(np.uint8)[numbers])


def _compiled(module: ir.Module) -> binding.ExecutionEngine:
    """For the machine that kernels are compiled for."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=name, features=features)
    return binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
