"""Triton's interpreter in less than half the time, with the same results.

It interprets the language anew for each call of a function, and each operation on small integers
twice, to see whether it overflows. Within a launch the first call has done the former for all; the
latter is left to long runs, since what tests compute is far too small to overflow. And it checks
and wraps the shape of every result, of which there are few. `quick_semantics.py` has the rest.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from math import prod
from types import FunctionType
from typing import Any

from effort import IS_LONG
from quick_semantics import quicken_calls, quicken_conversions, quicken_semantics


def quicken() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
        from triton.runtime.interpreter import _get_np_dtype, _LangPatchScope, _patch_lang
    except ImportError:  # or it is another version, which is left as it is
        return
    language, core = interpreter.tl, interpreter.tl.core

    @cache
    def languages(function: FunctionType) -> list[Any]:
        return [each for each in function.__globals__.values() if each is language or each is core]

    def interpret_once(function: FunctionType) -> Any:
        is_done = not any(core.is_builtin(each.load) for each in languages(function))
        return _LangPatchScope() if is_done else _patch_lang(function)

    of_numbers = cache(_get_np_dtype)

    def dtype_of(type_: Any) -> Any:
        scalar = type_.scalar
        is_pointer = isinstance(scalar, language.pointer_type)  # which cannot be hashed
        return _get_np_dtype(scalar) if is_pointer else of_numbers(scalar)

    @cache
    def of_block(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        made = core.block_type.__new__(core.block_type)
        check_and_wrap(made, core.float32, [*sizes])
        return made.shape, made.numel, str(made.shape)

    def make_block(self: Any, element: Any, shape: Any) -> None:
        self.element_ty = element
        self.shape, self.numel, text = of_block(tuple(map(core._unwrap_if_constexpr, shape)))
        self.name = f"<{text}, {element}>"

    def with_element(self: Any, element: Any) -> Any:
        made = core.block_type.__new__(core.block_type)
        made.element_ty, made.shape, made.numel = element, self.shape, self.numel
        made.name = f"<{of_block(tuple(self.shape))[2]}, {element}>"
        return made

    @cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([*map(core.constexpr, sizes)]), core.constexpr(prod(sizes))

    def make_tensor(self: Any, handle: Any, type_: Any) -> None:
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.shape, self.numel = of_tensor(tuple(type_.shape) if type_.is_block() else ())

    check_and_wrap = core.block_type.__init__
    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    core.block_type.with_element_ty = with_element
    interpreter._patch_lang, interpreter._get_np_dtype = interpret_once, dtype_of
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=IS_LONG)
    quicken_semantics(core, TritonSemantic)
    quicken_calls(interpreter)
    quicken_conversions(interpreter)
