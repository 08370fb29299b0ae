"""A GGUF file as it lies on disk: metadata, and tensors dequantised when they are asked for.

    magic, version, counts | key-value pairs | tensor names, shapes, types, offsets | padding | data

The `gguf` package's reader is not used: it makes a numpy view of every string, which takes seconds
for a vocabulary; here the header is walked once with `struct`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.checks import shorten, shown
from quire.errors import ModelError
from quire.kernels.gguf_numbers import numbers_of
from quire.models.checkpoints.git_lfs import refuse_pointer
from quire.models.checkpoints.lazy_tensor import FileTensor, TensorFile, as_stored

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

NATIVE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_TYPES, "IQ4_NL", "IQ4_XS", "MXFP4")
SUPPORTED_TYPES = (*NATIVE_DTYPES, *QUANTISED)

# Far above what files have. A header is read at once, so its size bounds the memory it takes.
MOST_HEADER_BYTES = 256 << 20
MOST_PAIRS, MOST_TENSORS, MOST_ITEMS = 1 << 16, 1 << 18, 1 << 22
MOST_DIMENSIONS = 4

# Kinds of metadata values; numbers with their `struct` codes.
STRING, ARRAY = 8, 9
U32, U64 = 4, 10
LENGTH = struct.Struct("<Q")  # of a string
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor's bytes are, and how they are to be read."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """The parsed header of a GGUF file, and its tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = TensorFile(path)
        header = _Header(path, _map(path))
        self.metadata, self.tensors = header.metadata, header.tensors

    def tensor(self, name: str) -> FileTensor:
        """As it is stored if its type is a float type, else dequantised to float32."""
        info = self.tensors[name]
        native = NATIVE_DTYPES.get(info.type.name)
        return FileTensor(
            self.content,
            info.start,
            info.shape,
            native or torch.float32,
            *GGML_QUANT_SIZES[info.type],
            as_stored(native) if native else partial(numbers_of, info.type),
            name,
        )

    def rows(self, name: str) -> FileTensor:
        """The bytes of the rows of a matrix, or of several, as they are stored."""
        info = self.tensors[name]
        *others, _ = info.shape
        shape = (*others, info.num_bytes // math.prod(others))
        return FileTensor(
            self.content, info.start, shape, torch.uint8, 1, 1, as_stored(torch.uint8), name
        )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.peek())
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file; give a .gguf file or a Hugging Face folder."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(
            f"Cannot read {path} ({error.strerror or error}); check the path and its permissions."
        ) from error


class _Header:
    """One walk over the header; `offset` is where the walk stands, at last where the data begin."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.offset = len(MAGIC)
        version = self._number(U32)
        if version not in VERSIONS:
            raise ModelError(
                f"{path} is GGUF version {version} and Quire reads little-endian versions 2 and 3;"
                " convert the model anew."
            )
        num_tensors = self._count(MOST_TENSORS, "tensors")
        num_pairs = self._count(MOST_PAIRS, "pairs of metadata")
        self.metadata = self._without_doubles(self._pair() for _ in range(num_pairs))
        stored = self._without_doubles(self._tensor() for _ in range(num_tensors))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            self._broken(f"its alignment is {shown(alignment)}")
        self.offset = -(-self.offset // alignment) * alignment
        self.tensors = {name: self._placed(info, alignment) for name, info in stored.items()}

    def _without_doubles(self, pairs: Iterator[tuple[str, T]]) -> dict[str, T]:
        found: dict[str, T] = {}
        for name, value in pairs:
            if name in found:
                self._broken(f"it has {shorten(name)} twice")
            found[name] = value
        return found

    def _count(self, most: int, what: str) -> int:
        count = int(self._number(U64))
        if count > most:
            self._broken(f"it says that it has {count:,} {what}")
        return count

    def _pair(self) -> tuple[str, Any]:
        name = self._string()
        return name, self._value(self._number(U32))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(kind)
        item_kind, length = self._number(U32), self._count(MOST_ITEMS, "items in a list")
        if item_kind == STRING:
            return self._strings(length)
        return list(self._numbers(item_kind, length))

    def _tensor(self) -> tuple[str, TensorInfo]:
        """One entry of the table, `start` still relative to the beginning of the data."""
        name, num_dims = self._string(), self._number(U32)
        if num_dims > MOST_DIMENSIONS:
            self._broken(f"{shorten(name)} has {num_dims:,} dimensions")
        dims = self._numbers(U64, num_dims)
        type_number, start = self._number(U32), self._number(U64)
        type_ = self._supported_type(name, type_number)
        block_values, block_bytes = GGML_QUANT_SIZES[type_]
        if not dims or 0 in dims or dims[0] % block_values:
            self._broken(f"{shorten(name)} has the shape {dims}")
        num_bytes = math.prod(dims) // block_values * block_bytes
        return name, TensorInfo(name, tuple(reversed(dims)), type_, start, num_bytes)

    def _supported_type(self, name: str, number: int) -> GGMLQuantizationType:
        known = {int(t): t for t in GGMLQuantizationType}
        found = known.get(number)
        if found is None or found.name not in SUPPORTED_TYPES:
            stored = found.name if found else f"type {number}"
            raise ModelError(
                f"{self._path} stores {shorten(name)} as {stored}, which Quire does not read;"
                f" choose a file of {', '.join(SUPPORTED_TYPES)}."
            )
        return found

    def _placed(self, info: TensorInfo, alignment: int) -> TensorInfo:
        start = self.offset + info.start
        if info.start % alignment:
            self._broken(f"{shorten(info.name)} is not aligned")
        if start + info.num_bytes > len(self._data):
            self._truncated()
        return replace(info, start=start)

    def _string(self) -> str:
        start = self._advance(LENGTH.size)
        start = self._advance(LENGTH.unpack_from(self._data, start)[0])
        return str(self._data[start : self.offset], "utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """As `_string`, in a loop of its own: a vocabulary has a hundred thousand."""
        data, offset, found = self._data, self.offset, list[str]()
        limit = min(len(data), MOST_HEADER_BYTES)
        for _ in range(count):
            start = offset + LENGTH.size
            end = start + LENGTH.unpack_from(data, offset)[0] if start <= limit else start
            if end > limit:
                self.offset = offset
                self._string()  # says what is wrong
            found.append(data[start:end].decode("utf-8", "replace"))
            offset = end
        self.offset = offset
        return found

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in NUMBERS:
            self._broken(f"a value has the unknown type {kind}")
        start = self._advance(struct.calcsize(NUMBERS[kind]) * count)
        return struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, start)

    def _advance(self, num_bytes: int) -> int:
        """Step over some bytes; returns where they begin."""
        start = self.offset
        self.offset += num_bytes
        if self.offset > len(self._data):
            self._truncated()
        if self.offset > MOST_HEADER_BYTES:
            self._broken(f"its header has more than {MOST_HEADER_BYTES >> 20} MiB")
        return start

    def _truncated(self) -> NoReturn:
        raise ModelError(f"{self._path} is truncated; download it again.")

    def _broken(self, why: str) -> NoReturn:
        raise ModelError(f"{self._path} is damaged ({why}); download it again.")
