"""The CPU backend with kernels of its own, in one pass over memory each.

What they are not made for is left to torch, as `CpuBackend` does it: float16, sizes that vectors do
not divide, tensors of mixed types or with gaps.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import CpuBackend, attend_prefill, pages
from quire.kernels.cpu_plan import Geometry
from quire.kernels.numba.attention import attention_kernel
from quire.kernels.numba.kernel import ELEMENTS
from quire.kernels.numba.kv_splits import KVSplits, plan_splits
from quire.kernels.numba.simd import LANES
from quire.kernels.numba.token_ops import gate_kernel, norm_kernel, rotate_kernel
from quire.kernels.plain import HeadScale, Rotation

log = logging.getLogger("quire")

# Numbers to compute below which the calling thread is done before another one is awake.
SMALL = 16_384


class _Step:
    """What is the same for all layers of a step: worked out by the first, for those after it."""

    def __init__(self, batch: AttentionBatch, cache: Tensor) -> None:
        self.batch = batch
        self.cache = cache
        self.shape = shape = Geometry(*cache.shape)
        self.pool = cache.data_ptr()
        self.layer_bytes = cache.stride(1) * cache.element_size()
        self.sizes = (shape.kv_heads, shape.block_size, shape.head_dim, cache.stride(0))
        self.slots = batch.slot_mapping.data_ptr()
        self.tables = (batch.block_tables.data_ptr(), batch.block_tables.stride(0))
        self._splits: dict[tuple[int, int | None, int], KVSplits] = {}

    def splits(self, heads: int, window: int | None) -> KVSplits:
        threads = torch.get_num_threads()
        key = heads, window, threads
        splits = self._splits.get(key)
        if splits is None:
            dtype = self.cache.dtype
            splits = plan_splits(self.batch, self.shape, window, dtype, heads, threads)
            self._splits[key] = splits
        return splits


class _Local(threading.local):
    """Plans have room for intermediate results, so each Python thread has its own."""

    step: _Step | None = None


class NumbaBackend(CpuBackend):
    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._ready: dict[torch.dtype, bool] = {}
        self._compiling = threading.Lock()

    def prepare(self, dtype: torch.dtype) -> None:
        threading.Thread(target=self.compile, args=(dtype,), daemon=True).start()

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        rows, size = stream.shape
        dtype = stream.dtype
        if (
            not self._is_ready(dtype)
            or size % LANES
            or weight.dtype != dtype
            or not stream.is_contiguous()
            or (delta is not None and not (delta.dtype == dtype and delta.is_contiguous()))
        ):
            return super().add_rms_norm(stream, delta, weight, eps)
        out = torch.empty_like(stream)
        norm_kernel(
            dtype,
            _threads(rows * size),
            0,
            rows,
            size,
            stream.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            delta is not None,
            weight.data_ptr(),
            out.data_ptr(),
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        features = both // 2
        dtype = gate_up.dtype
        if not self._is_ready(dtype) or features % LANES or not gate_up.is_contiguous():
            return super().silu_mul(gate_up)
        out = torch.empty((rows, features), dtype=dtype)
        gate_kernel(
            dtype,
            _threads(rows * features),
            0,
            rows,
            features,
            gate_up.data_ptr(),
            out.data_ptr(),
        )
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> Tensor:
        tokens, all_heads, head_dim = qkv.shape
        dtype = qkv.dtype
        cos, sin = rotation
        if (
            not self._is_ready(dtype)
            or head_dim % (2 * LANES)
            or not dtype == cos.dtype == sin.dtype == cache.dtype
            or (scale is not None and scale.weight.dtype != dtype)
            or not qkv.is_contiguous()
        ):
            return super().rotate_and_write(qkv, scale, rotation, cache, layer, batch)
        step = self._step_of(batch, cache)
        heads = all_heads - 2 * step.shape.kv_heads
        q = torch.empty((tokens, heads, head_dim), dtype=dtype)
        rotate_kernel(
            dtype,
            _threads(tokens * all_heads * head_dim),
            0,
            tokens,
            heads,
            *step.sizes,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            0 if scale is None else scale.weight.data_ptr(),
            scale is not None,
            step.slots,
            q.data_ptr(),
            step.pool + layer * step.layer_bytes,
            0.0 if scale is None else scale.eps,
        )
        return q

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        dtype, heads, head_dim = q.dtype, *q.shape[1:]
        if not self._is_ready(dtype) or head_dim % LANES or cache.dtype != dtype:
            return super().paged_attention(q, cache, layer, batch, scale, window)
        step = self._step_of(batch, cache)
        splits = step.splits(heads, window)
        q = q.contiguous()
        out = (torch.empty if splits.covers_all else torch.zeros)(q.shape, dtype=dtype)
        if splits.count:
            attention_kernel(
                dtype,
                _threads(splits.tokens * heads * head_dim),
                0,
                0,
                splits.count,
                splits.fields.data_ptr(),
                splits.finished.data_ptr(),
                q.data_ptr(),
                out.data_ptr(),
                step.pool + layer * step.layer_bytes,
                *step.tables,
                heads,
                *step.sizes,
                splits.results.data_ptr(),
                splits.scratch.data_ptr(),
                scale,
            )
        if splits.prefills:
            pool = pages(cache, layer, step.shape)
            for prefill in splits.prefills:
                attend_prefill(q, pool, prefill, step.shape, scale, out)
        return out

    def _is_ready(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for tensors of this type; if there can be, there will be."""
        ready = self._ready.get(dtype)
        return self.compile(dtype) if ready is None else ready

    def compile(self, dtype: torch.dtype) -> bool:
        """Have kernels for tensors of this type, if there can be any; whether there are."""
        with self._compiling:
            if dtype not in self._ready:
                self._ready[dtype] = dtype in ELEMENTS and _compiles(dtype)
            return self._ready[dtype]

    def _step_of(self, batch: AttentionBatch, cache: Tensor) -> _Step:
        step = self._local.step
        if step is None or step.batch is not batch or step.cache is not cache:
            step = self._local.step = _Step(batch, cache)
        return step


def _compiles(dtype: torch.dtype) -> bool:
    try:
        for kernel in (norm_kernel, rotate_kernel, attention_kernel, gate_kernel):
            kernel.compile(dtype)
    except Exception as error:  # whatever it is, torch has a way of its own
        log.warning("CPU kernels are off for %s, which costs speed: %s", dtype, error)
        return False
    return True


def _threads(numbers: int) -> int:
    """How many threads are to compute this many numbers."""
    return 1 if numbers < SMALL else torch.get_num_threads()
