"""Instructions of a GPU's assembly, followed one by one over tensors without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

Registers = dict[str, Tensor]


def follow(asm: str, inputs: list[Tensor], dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """The results `$0`, `$1`, … of so many types, of the inputs whose numbers follow them. What a
    register holds is kept as an integer, or as a number where the instruction says float32."""
    registers = {f"${len(dtypes) + i}": _as_held(x) for i, x in enumerate(inputs)}
    for line in asm.strip("{} \n").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        name, arguments = line.split(" ", 1)
        target, *sources = re.findall(r"\{[^}]*\}|[^\s,]+", arguments)
        result = _INSTRUCTIONS[name](*(_value(source, registers) for source in sources))
        if target.startswith("{"):
            low, high = re.findall(r"[$\w]+", target)
            registers[low], registers[high] = result & 0xFFFF, result >> 16
        else:
            registers[target] = result
    return tuple(_as_number(registers[f"${i}"], dtype) for i, dtype in enumerate(dtypes))


def _as_held(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.long() & 0xFFFF_FFFF


def _as_number(held: Tensor, dtype: torch.dtype) -> Tensor:
    return held.to(torch.uint16).view(dtype) if dtype == torch.float16 else held.to(dtype)


def _value(source: str, registers: Registers) -> Tensor:
    if source in registers:
        return registers[source]
    if source.startswith("0f"):
        return _float_of(torch.tensor(int(source[2:], 16)))
    return torch.tensor(int(source, 0))


def _permute_bytes(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Without the mode that spreads signs."""
    bytes_ = [a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)]
    eight = torch.stack(torch.broadcast_tensors(*bytes_, selector)[:8])
    chosen = [(selector >> 4 * i & 0xF).expand(eight.shape[1:]) for i in range(4)]
    return sum(eight.gather(0, byte[None])[0] << 8 * i for i, byte in enumerate(chosen))


def _by_bits(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Bit by bit what the table has for those of the three, the first counting four."""
    found = torch.zeros((), dtype=torch.int64)
    for i in range(8):
        if int(table) >> i & 1:
            terms = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            found = found | terms[0] & terms[1] & terms[2]
    return found & 0xFFFF_FFFF


def _multiply_add(dtype: torch.dtype) -> Callable[..., Tensor]:
    def half(x: Tensor) -> Tensor:
        return (x & 0xFFFF).to(torch.uint16).view(dtype).double()

    def both(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        low, high = (half(a >> i) * half(b >> i) + half(c >> i) for i in (0, 16))
        bits = [x.to(dtype).view(torch.uint16).long() for x in (low, high)]
        return bits[0] | bits[1] << 16

    return both


def _floats(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In float32, of registers that hold either numbers or the bits of numbers."""

    def followed(*registers: Tensor) -> Tensor:
        numbers = [x if x.is_floating_point() else _float_of(x) for x in registers]
        return operation(*(x.double() for x in numbers)).float()

    return followed


def _float_of(bits: Tensor) -> Tensor:
    return torch.where(bits >> 31 == 1, bits - (1 << 32), bits).int().view(torch.float32)


def _rounded_pair(dtype: torch.dtype) -> Callable[..., Tensor]:
    """The first one in the upper half."""

    def both(high: Tensor, low: Tensor) -> Tensor:
        bits = [x.to(dtype).view(torch.uint16).long() for x in (low, high)]
        return bits[0] | bits[1] << 16

    return both


def _e4m3_pair(pair: Tensor) -> Tensor:
    def half(byte: Tensor) -> Tensor:
        numbers = byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
        return numbers.view(torch.uint16).long()

    return half(pair & 0xFF) | half(pair >> 8) << 16


_INSTRUCTIONS = {
    "mov.b32": lambda x: x,
    "prmt.b32": _permute_bytes,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & 0xFFFF_FFFF,
    "shr.b32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFF_FFFF,
    "lop3.b32": _by_bits,
    "fma.rn.bf16x2": _multiply_add(torch.bfloat16),
    "fma.rn.f16x2": _multiply_add(torch.float16),
    "fma.rn.f32": _floats(lambda a, b, c: a * b + c),
    "add.rn.f32": _floats(torch.add),
    "mul.rn.f32": _floats(torch.mul),
    "cvt.rn.bf16x2.f32": _rounded_pair(torch.bfloat16),
    "cvt.rn.f16x2.f32": _rounded_pair(torch.float16),
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair,
    "max.f32": torch.maximum,
    "lg2.approx.ftz.f32": torch.log2,
    "rcp.approx.ftz.f32": torch.reciprocal,
}
