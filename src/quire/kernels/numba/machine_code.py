"""Compiled kernels: kept on disk, and loaded without the compiler.

Importing Numba takes ten times as long as loading all kernels, and more memory than a small model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from quire.cache_folder import cache_folder
from quire.kernels.numba import object_file
from quire.kernels.numba.host import is_x86_linux, this_cpu

log = logging.getLogger("quire")

DIGEST_BYTES = 32

_loading = threading.Lock()
_engines: list[Any] = []  # what is loaded stays: kernels are called by their addresses


class MachineCode(NamedTuple):
    symbol: str
    content: bytes  # an object file

    def load(self) -> int:
        """Returns the address of the function."""
        if is_x86_linux():
            try:
                return object_file.load(self.content, self.symbol)
            except object_file.UnknownObject as error:
                log.debug("A kernel is loaded by LLVM: %s", error)
        return self.load_by_llvm()

    def load_by_llvm(self) -> int:
        from llvmlite import binding

        with _loading:
            binding.initialize_native_target()
            binding.initialize_native_asmprinter()
            machine = binding.Target.from_default_triple().create_target_machine()
            engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
            engine.add_object_file(binding.ObjectFileRef.from_data(self.content))
            engine.finalize_object()
            _engines.append(engine)
            return int(engine.get_function_address(self.symbol))


def folders() -> list[Path]:
    """Where compiled kernels may lie, the best place first."""
    found = [Path(__file__).parent / "__pycache__"]
    with suppress(RuntimeError):  # no home
        found.append(cache_folder() / "kernels")
    return found


def read(name: str) -> MachineCode | None:
    """What was kept under this name, if it is there and whole."""
    for folder in folders():
        try:
            kept = (folder / f"{name}.{_made_from()}.{_made_for()}.o").read_bytes()
        except OSError:
            continue
        digest, rest = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
        if hashlib.sha256(rest).digest() == digest:
            symbol, _, content = rest.partition(b"\n")
            return MachineCode(symbol.decode(), content)
    return None


def keep(name: str, code: MachineCode) -> None:
    """In the first folder that can be written to; what older sources made of it is removed."""
    rest = code.symbol.encode() + b"\n" + code.content
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / f"{name}.{_made_from()}.{_made_for()}.o"
            unfinished = place.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            try:
                unfinished.write_bytes(hashlib.sha256(rest).digest() + rest)
                unfinished.replace(place)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            for other in folder.glob(f"{name}.*.o"):
                if other.name.split(".")[-3] != _made_from():
                    other.unlink(missing_ok=True)
        except OSError:  # read-only, or full: then the next process compiles again
            continue
        return


@cache
def _made_from() -> str:
    return _short(b"".join(path.read_bytes() for path in _sources()))


def _sources() -> list[Path]:
    here = Path(__file__).parent
    others = ("kernels.py", "sizes.py", "source.py", "compiler.py")
    orders = ("gguf_bits.py", "gguf_blocks.py")  # of what kernels read
    beside = [*(here / name for name in others), *(here.parent / name for name in orders)]
    return [*sorted((here / "code").rglob("*.py")), *beside]


@cache
def _made_for() -> str:
    settings = sorted(each for each in os.environ.items() if each[0].startswith("NUMBA_"))
    compiler = version("llvmlite"), version("numba")
    return _short(repr((this_cpu(), compiler, settings)).encode())


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
