"""The CPU backend with kernels of its own, in one pass over memory each.

What they are not made for is left to torch, as `CpuBackend` does it: float16, sizes that vectors do
not divide, tensors of mixed types (but for weights of norms in float32) or with gaps.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from quire.kernels.activation import Activation, ClampedSwiGLU, Gating
from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import CpuBackend, CpuPlan, attend_prefill
from quire.kernels.cpu_plan import PrefillTiles, plan_prefills
from quire.kernels.experts import ExpertMatrices, ExpertMLPs, RouterScores, Routing
from quire.kernels.lent_memory import empty
from quire.kernels.linear import IS_ARM, PackedMatrix
from quire.kernels.numba import experts, prompt_attention
from quire.kernels.numba.float_product import FloatProduct
from quire.kernels.numba.grouped_linear import grouped_linear
from quire.kernels.numba.host import has_avx512
from quire.kernels.numba.kernel import DTYPES
from quire.kernels.numba.kernels import (
    attention_kernel,
    combine_kernel,
    float_product_kernel,
    gelu_kernel,
    grouped_kernel,
    norm_kernel,
    prompt_kernel,
    replay_kernel,
    rotate_kernel,
    route_kernel,
    silu_kernel,
    sort_kernel,
    wide_norm_kernel,
    wide_rotate_kernel,
)
from quire.kernels.numba.kv_splits import KVSplits, plan_splits
from quire.kernels.numba.recording import Recording
from quire.kernels.numba.sizes import GROUPED_TILE, LANES
from quire.kernels.pages import LayerPages, PageShape
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.scoring import Scoring

log = logging.getLogger("quire")

KERNELS = (norm_kernel, rotate_kernel, attention_kernel, silu_kernel, gelu_kernel)
# Of float32 alone.
FLOAT_KERNELS = (
    grouped_kernel,
    replay_kernel,
    route_kernel,
    sort_kernel,
    combine_kernel,
    *((float_product_kernel,) if has_avx512() else ()),
    *((prompt_kernel,) if prompt_attention.IS_FASTER else ()),
)
WIDE_KERNELS = (wide_norm_kernel, wide_rotate_kernel)

# Numbers to compute below which the calling thread is done before another one is awake.
SMALL = 16_384
FEW = 24 if IS_ARM else 8  # tokens of an expert, on average, above which torch multiplies faster


class _Plan(CpuPlan):
    """What is the same for all layers of a pass: worked out by the first, for those after it.

    It has room for intermediate results, so that no two Python threads may share a batch.
    """

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__()
        self.slots = batch.slot_mapping.data_ptr()
        self.tables = (batch.block_tables.data_ptr(), batch.block_tables.stride(0))
        self.room = 0  # for so many tokens of each sequence
        self._splits: dict[tuple[PageShape, PageShape, int, int | None, int], KVSplits] = {}
        self._prefills: dict[tuple[PageShape, PageShape, int | None], list[PrefillTiles]] = {}

    def splits(
        self,
        batch: AttentionBatch,
        pages: LayerPages,
        heads: int,
        window: int | None,
    ) -> KVSplits:
        threads = torch.get_num_threads()
        key = pages.k_shape, pages.v_shape, heads, window, threads
        splits = self._splits.get(key)
        if splits is None:
            splits = plan_splits(batch, pages, window, heads, threads, self.room)
            self._splits[key] = splits
        return splits

    def prefills(
        self,
        sequences: list[int],
        batch: AttentionBatch,
        pages: LayerPages,
        dtype: torch.dtype,
        window: int | None,
    ) -> list[PrefillTiles]:
        """The tiles of long prompts, for torch."""
        key = pages.k_shape, pages.v_shape, window
        if key not in self._prefills:
            self._prefills[key] = plan_prefills(sequences, batch, pages, window, dtype)
        return self._prefills[key]

    def renew(self, batch: AttentionBatch) -> bool:
        return all(splits.renew(batch, key[3]) for key, splits in self._splits.items())


class NumbaBackend(CpuBackend):
    name = "numba"

    def __init__(self) -> None:
        self._ready: dict[torch.dtype, bool] = {}
        self._compiling = threading.Lock()

    def prepare(self, dtype: torch.dtype) -> None:
        threading.Thread(target=self.compile, args=(dtype,), daemon=True).start()

    def begin(self, batch: AttentionBatch) -> None:
        batch.plan.content = _Plan(batch)

    def recording(self) -> Recording:
        return Recording()

    def leave_room(self, batch: AttentionBatch, tokens: int) -> None:
        """What is worked out for a batch shall fit a step alike whose sequences are so long."""
        plan: _Plan = batch.plan.content
        plan.room = tokens

    def renew(self, batch: AttentionBatch, like: AttentionBatch) -> bool:
        """Work out again, for the lengths of another step and in the same memory, what the layers
        needed of a batch; whether there was room for it."""
        plan: _Plan = batch.plan.content
        return plan.renew(like)

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        rows, size = stream.shape
        dtype = stream.dtype
        if (
            not self._is_ready(dtype)
            or size % LANES
            or weight.dtype not in (dtype, torch.float32)
            or not stream.is_contiguous()
            or (delta is not None and not (delta.dtype == dtype and delta.is_contiguous()))
        ):
            return super().add_rms_norm(stream, delta, weight, eps)
        out = empty(stream.shape, dtype)
        kernel = norm_kernel if weight.dtype == dtype else wide_norm_kernel
        kernel(
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

    def act_and_mul(self, gate_up: Tensor, activation: Gating) -> Tensor:
        rows, both = gate_up.shape
        features = both // 2
        dtype = gate_up.dtype
        if (
            not self._is_ready(dtype)
            or features % LANES
            or not gate_up.is_contiguous()
            or isinstance(activation, ClampedSwiGLU)
        ):
            return super().act_and_mul(gate_up, activation)
        out = empty((rows, features), dtype)
        kernel = gelu_kernel if activation is Activation.GELU_TANH else silu_kernel
        kernel(
            dtype,
            _threads(rows * features),
            0,
            rows,
            features,
            gate_up.data_ptr(),
            out.data_ptr(),
        )
        return out

    def gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: PackedMatrix | None,
        activation: Activation,
    ) -> Tensor:
        if (
            isinstance(packed, FloatProduct)
            and activation is Activation.SILU
            and packed.gates
            and packed.takes(x)
        ):
            return packed(x, bias, gated=True)
        return super().gated_linear(x, weight, bias, packed, activation)

    def route(self, x: Tensor, scores: RouterScores, batch: AttentionBatch) -> Routing | None:
        if not (experts.can_route(x, scores) and self._is_ready(x.dtype)):
            return None
        plan: _Plan = batch.plan.content
        return experts.route(x, scores, plan.slots, _threads(len(x) * scores.weight.numel()))

    def experts(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        if not (experts.can_compute(x, routing, mlps) and self._is_ready(x.dtype)):
            return super().experts(x, routing, mlps)
        assert mlps.gate_up.interleaved is not None
        assert mlps.down.interleaved is not None
        pairs = experts.sort(x, routing, mlps.count)
        if mlps.activation is Activation.SILU and mlps.gate_up.interleaved.gates:
            hidden = mlps.gate_up.interleaved(pairs.rows, gated=True, runs=pairs.runs)
        else:
            both = mlps.gate_up.interleaved(pairs.rows, runs=pairs.runs)
            hidden = self.act_and_mul(both, mlps.activation)
        found = mlps.down.interleaved(hidden, runs=pairs.runs)
        return experts.combine(found, pairs, routing.weights, _threads(found.numel()))

    def grouped_linear(self, matrices: ExpertMatrices, rows: Tensor, sizes: list[int]) -> Tensor:
        weights = matrices.dense
        used = len(sizes) - sizes.count(0)
        if (
            weights is None
            or not used
            or len(rows) > FEW * used
            or not rows.dtype == weights.dtype == torch.float32
            or weights.shape[1] % GROUPED_TILE
            or weights.shape[2] % LANES
            or not rows.is_contiguous()
            or not self._is_ready(rows.dtype)
        ):
            return super().grouped_linear(matrices, rows, sizes)
        threads = _threads(used * weights.shape[1] * weights.shape[2])
        found = grouped_linear(weights, rows, sizes, threads)
        if matrices.bias is not None:
            found += matrices.bias.repeat_interleave(torch.tensor(sizes), dim=0)
        return found

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
    ) -> Tensor:
        tokens, features = qkv.shape
        dtype = qkv.dtype
        cos, sin = rotation
        k_shape, v_width = pages.k_shape, pages.v_width
        if (
            not self._is_ready(dtype)
            or k_shape.width % (2 * LANES)
            or v_width % LANES
            or not dtype == cos.dtype == sin.dtype == pages.k.dtype
            or (scale is not None and scale.weight.dtype not in (dtype, torch.float32))
            or not qkv.is_contiguous()
        ):
            return super().rotate_and_write(qkv, scale, rotation, pages, batch)
        plan: _Plan = batch.plan.content
        heads = (features - k_shape.kv_heads * v_width) // k_shape.width - k_shape.kv_heads
        q = empty((tokens, heads, k_shape.width), dtype)
        is_wide = scale is not None and scale.weight.dtype != dtype
        kernel = wide_rotate_kernel if is_wide else rotate_kernel
        kernel(
            dtype,
            _threads(tokens * features),
            0,
            tokens,
            heads,
            *k_shape,
            v_width,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            0 if scale is None else scale.weight.data_ptr(),
            scale is not None,
            plan.slots,
            q.data_ptr(),
            pages.k.data_ptr(),
            pages.v.data_ptr(),
            0.0 if scale is None else scale.eps,
        )
        return q

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        dtype, heads = q.dtype, q.shape[1]
        k_shape, v_width = pages.k_shape, pages.v_width
        if (
            not self._is_ready(dtype)
            or k_shape.width % LANES
            or v_width % LANES
            or pages.k.dtype != dtype
        ):
            return super().paged_attention(q, pages, batch, scoring)
        plan: _Plan = batch.plan.content
        splits = plan.splits(batch, pages, heads, scoring.window)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        q = q.contiguous()
        out = empty((len(q), heads, v_width), dtype)
        if not splits.covers_all:
            out.zero_()
        if splits.count:
            attention_kernel(
                dtype,
                _threads(splits.tokens * heads * k_shape.width),
                0,
                0,
                splits.fields.data_ptr(),
                splits.finished.data_ptr(),
                q.data_ptr(),
                out.data_ptr(),
                pages.k.data_ptr(),
                pages.v.data_ptr(),
                *plan.tables,
                heads,
                *k_shape,
                v_width,
                splits.results.data_ptr(),
                splits.scratch.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                sinks is not None,
                scoring.softcap or 0.0,
                scoring.softcap is not None,
                scoring.scale,
            )
        if prompt_attention.can_attend(q):
            for sequence in splits.long:
                prompt_attention.attend(q, pages, batch, sequence, scoring, out)
        else:
            for prefill in plan.prefills(splits.long, batch, pages, dtype, scoring.window):
                attend_prefill(q, pages, prefill, scoring, out)
        return out

    def _is_ready(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for tensors of this type; if there can be, there will be."""
        ready = self._ready.get(dtype)
        return self.compile(dtype) if ready is None else ready

    def compile(self, dtype: torch.dtype) -> bool:
        """Have kernels for tensors of this type, if there can be any; whether there are."""
        with self._compiling:
            if dtype not in self._ready:
                self._ready[dtype] = dtype in DTYPES and _compiles(dtype)
            return self._ready[dtype]


def _compiles(dtype: torch.dtype) -> bool:
    try:
        for kernel in KERNELS + (FLOAT_KERNELS if dtype == torch.float32 else WIDE_KERNELS):
            kernel.compile(dtype)
    except Exception as error:  # whatever it is, torch has a way of its own
        log.warning("CPU kernels are off for %s, which costs speed: %s", dtype, error)
        return False
    return True


def _threads(numbers: int) -> int:
    """How many threads are to compute this many numbers."""
    return 1 if numbers < SMALL else torch.get_num_threads()
