"""The questions that Triton's language asks before each operation, answered at once where they can.

Are these constants, are two types or shapes the same, is there anything to cast or to broadcast?
Most of the interpreter's time goes there. Whatever is not plain is left to Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from effort import IS_LONG
from numpy.typing import NDArray


def quicken_semantics(core: Any, semantic: Any) -> None:
    _quicken_constants(core)
    _quicken_shapes(core)
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    def cast_if_other(self: Any, value: Any, type_: Any, rounding: Any = None) -> Any:
        is_the_same = value.type.scalar is type_.scalar
        return value if is_the_same else cast(self, value, type_, rounding)

    def broadcast_if_other(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block():
            is_the_same = one.shape is other.shape  # shapes are made once
        else:
            is_the_same = one.is_block() == other.is_block()
        return (left, right) if is_the_same else broadcast(self, left, right)

    semantic.cast, semantic.broadcast_impl_value = cast_if_other, broadcast_if_other


def _quicken_constants(core: Any) -> None:
    unwrap, constant = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, core.dtype, core.pointer_type, core.block_type, type(None)}
    plain |= {int, float, bool, str}

    def unwrap_if_wrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_wrapped


def _quicken_shapes(core: Any) -> None:
    are_equal, item = core.tuple.__eq__, core.tuple.__getitem__
    are_equal_types = core.dtype.__eq__

    def compare(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(size) is int for size in other):
            return core.constexpr(self.values == other)
        return are_equal(self, other)

    def take(self: Any, place: Any) -> Any:
        return self.values[place] if type(place) is int else item(self, place)

    core.tuple.__eq__, core.tuple.__getitem__ = compare, take
    core.dtype.__eq__ = lambda self, other: self is other or are_equal_types(self, other)


def quicken_calls(interpreter: Any) -> None:
    """A call of the language goes straight to what it is there; a result is not checked again."""

    def go_straight(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        scope.set_attr(place, name, call)

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter._patch_attr = go_straight
    if not IS_LONG:
        interpreter.TensorHandle.__init__ = make


def quicken_conversions(interpreter: Any) -> None:
    """The interpreter takes numbers apart to convert them; a table has what it makes of each."""
    convert, brain_float = interpreter._convert_float, interpreter.tl.bfloat16

    @cache
    def every_number(of: Any, as_: Any, rounding: Any) -> NDArray[Any]:
        bits = of.primitive_bitwidth
        return np.asarray(convert(np.arange(1 << bits, dtype=f"u{bits // 8}"), of, as_, rounding))

    def look_up(numbers: NDArray[Any], of: Any, as_: Any, rounding: Any) -> NDArray[Any]:
        if of.primitive_bitwidth <= 16:
            places = numbers.view(f"u{numbers.itemsize}")
            return np.asarray(every_number(of, as_, rounding)[places])
        if as_ == brain_float and rounding is None and of.primitive_bitwidth == 32:
            bits = numbers.view(np.uint32)
            is_subnormal = (bits & 0x7F800000 == 0) & (bits & 0x007FFFFF != 0)
            if not is_subnormal.any():
                return np.asarray((bits >> 16).astype(np.uint16))  # rounded to zero
        return np.asarray(convert(numbers, of, as_, rounding))

    interpreter._convert_float = look_up
