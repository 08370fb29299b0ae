"""What this machine's processor can do, for the compiler that makes kernels."""

from __future__ import annotations

import ctypes
import platform
import sys

from numba import config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target

# Which word of the system's, and which of its bits, says that an ARM processor has a feature.
HWCAP = 16
ARM_FEATURES = {"dotprod": (HWCAP, 20)}


def name_arm_features() -> None:
    """On Linux LLVM asks for a few of ARM's features only: name those that kernels use, too.

    This is done before anything is compiled; where something was, LLVM's own list stays.
    """
    if sys.platform != "linux" or platform.machine() != "aarch64" or config.CPU_FEATURES:
        return
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = (ctypes.c_ulong,), ctypes.c_ulong
    found = [name for name, (word, bit) in ARM_FEATURES.items() if getauxval(word) >> bit & 1]
    config.CPU_FEATURES = ",".join([get_host_cpu_features(), *(f"+{name}" for name in found)])


def has_feature(name: str) -> bool:
    """Whether Numba compiles for machines with this."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{name}" in features.split(",")
