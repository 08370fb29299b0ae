"""What is called otherwise in later versions of Gluon, a language in Triton, than in the first."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
