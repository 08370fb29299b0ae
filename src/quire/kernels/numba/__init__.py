"""Kernels for a CPU: all between a model's matrix products, compiled when first used."""

from quire.kernels.numba.backend import NumbaBackend

__all__ = ["NumbaBackend"]
