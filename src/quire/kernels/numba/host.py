"""What this machine's processor can do, for the compiler that makes kernels.

LLVM knows it, and is not loaded where Linux says enough: on x86-64.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

from quire import hardware

# Which word of the system's, and which of its bits, says that an ARM processor has a feature.
HWCAP = 16
ARM_FEATURES = {"dotprod": (HWCAP, 20)}


@cache
def cpu_features() -> str:
    """In LLVM's words. On Linux it asks for a few of ARM's features only: those that kernels use
    are named here, too."""
    from llvmlite import binding

    try:
        features = [binding.get_host_cpu_features().flatten()]
    except RuntimeError:  # LLVM does not know this machine
        features = []
    if is_arm_linux():
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = (ctypes.c_ulong,), ctypes.c_ulong
        features += [
            f"+{name}" for name, (word, bit) in ARM_FEATURES.items() if getauxval(word) >> bit & 1
        ]
    return ",".join(features)


def has_avx512() -> bool:
    if is_x86_linux():
        return "avx512f" in hardware.cpu_features()
    return "+avx512f" in cpu_features().split(",")


def is_x86_linux() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def is_arm_linux() -> bool:
    return sys.platform == "linux" and platform.machine() == "aarch64"


def this_cpu() -> str:
    """What tells it from processors for which other code may be compiled."""
    flags = hardware.cpu_features() if is_x86_linux() else frozenset()
    if flags:  # else /proc is not there
        return f"{hardware.cpu_name()} {' '.join(sorted(flags))}"
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {cpu_features()}"
