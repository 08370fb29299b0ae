"""Kernels for a CPU: all between a model's matrix products, compiled when first used."""

from quire.kernels.numba.host import name_arm_features

name_arm_features()  # before anything is compiled

from quire.kernels.numba.backend import NumbaBackend  # noqa: E402

__all__ = ["NumbaBackend"]
