"""Compiled kernels loaded by hand, on Linux and x86-64.

LLVM loads any object file, and takes 53 MB and 0.1 s of a process for it. The files that it makes
for kernels have few sections, and addresses of 64 bits to fill in. On ARM a loader has to flush the
processor's cache of instructions, too, and LLVM is the loader there.

    header          where the table of sections is
    sections        what memory is to hold; symbols and their names; relocations of another section
    relocation      where an address is missing, the symbol whose it is, and a number to add
"""

from __future__ import annotations

import ctypes
import mmap
from struct import Struct, error
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, the only version
_X86_64 = 62
_HEADER = Struct("<18xH20xQ10xHH2x")  # machine, place of the sections, size and number of them
_SECTION = Struct("<4xIQ8xQQIIQ8x")
_SYMBOL = Struct("<I2xHQ8x")  # name, section, value
_RELOCATION = Struct("<QIIq")  # place, kind, symbol, what to add
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8  # kinds of sections
_IN_MEMORY = 2  # of a section's flags
_ELSEWHERE = 0  # the section of a symbol of the process
_ADDRESS, _DISTANCE = 1, 24  # kinds of relocations, both of 64 bits

_kept: list[mmap.mmap] = []  # what is loaded stays: kernels are called by their addresses


class UnknownObject(Exception):
    """The file has something that is not known here."""


class _Section(NamedTuple):
    kind: int
    flags: int
    offset: int
    size: int
    link: int  # relocations: the symbols they name; symbols: their names
    info: int  # relocations: the section that they belong to
    alignment: int


def load(content: bytes, symbol: str) -> int:
    """Returns the address of the function."""
    try:
        loaded = _Loaded(content)
        address = loaded.find(symbol.encode())
        loaded.finish()
    except (error, IndexError, ValueError, AttributeError, OSError) as reason:
        raise UnknownObject(f"{type(reason).__name__}: {reason}") from reason
    return address


class _Loaded:
    def __init__(self, content: bytes) -> None:
        self._content = content
        machine, table, size, count = _HEADER.unpack_from(content)
        if content[: len(_MAGIC)] != _MAGIC or machine != _X86_64 or size != _SECTION.size:
            raise UnknownObject("no object file of x86-64")
        self._sections = [
            _Section(*_SECTION.unpack_from(content, table + i * size)) for i in range(count)
        ]
        self._process = ctypes.CDLL(None)
        end = 0
        places: dict[int, int] = {}  # of sections in memory, by their numbers
        for number, section in enumerate(self._sections):
            if section.flags & _IN_MEMORY:
                places[number] = -(-end // max(1, section.alignment)) * max(1, section.alignment)
                end = places[number] + section.size
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(1, end), private)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._places = places
        for number, place in places.items():
            section = self._sections[number]
            if section.kind != _NO_BITS:
                self._memory[place : place + section.size] = self._bytes_of(section)
        for section in self._sections:
            if section.kind == _RELOCATIONS and section.info in places:
                self._relocate(section, places[section.info])

    def find(self, name: bytes) -> int:
        """The address of a symbol of the file."""
        for table in self._sections:
            if table.kind == _SYMBOLS:
                for number in range(table.size // _SYMBOL.size):
                    if self._name(table, number) == name:
                        return self._address(table, number)
        raise UnknownObject(f"no symbol {name!r}")

    def finish(self) -> None:
        """From now on its instructions may be run, and nothing of it changed."""
        length = len(self._memory)
        protect = self._process.mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._begin, length, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError("the system lets no memory be run that was written to")
        _kept.append(self._memory)

    def _relocate(self, relocations: _Section, begin: int) -> None:
        for place, kind, symbol, added in _RELOCATION.iter_unpack(self._bytes_of(relocations)):
            value = self._address(self._sections[relocations.link], symbol) + added
            if kind == _DISTANCE:
                value -= self._begin + begin + place
            elif kind != _ADDRESS:
                raise UnknownObject(f"relocation {kind}")
            at = begin + place
            self._memory[at : at + 8] = (value % 2**64).to_bytes(8, "little")

    def _address(self, table: _Section, number: int) -> int:
        _, section, value = self._symbol(table, number)
        if section == _ELSEWHERE:
            function = getattr(self._process, self._name(table, number).decode())
            return ctypes.cast(function, ctypes.c_void_p).value or 0
        if section not in self._places:
            raise UnknownObject(f"symbol in section {section}")
        return self._begin + self._places[section] + value

    def _symbol(self, table: _Section, number: int) -> tuple[int, int, int]:
        found: tuple[int, int, int] = _SYMBOL.unpack_from(
            self._content, table.offset + number * _SYMBOL.size
        )
        return found

    def _name(self, table: _Section, number: int) -> bytes:
        begin = self._sections[table.link].offset + self._symbol(table, number)[0]
        return self._content[begin : self._content.index(b"\0", begin)]

    def _bytes_of(self, section: _Section) -> bytes:
        return self._content[section.offset : section.offset + section.size]
