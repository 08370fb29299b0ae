"""KV in fp8: kernels write what the reference writes, and attend to it as the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.fp8 import FP8, SCALE, dequantise, quantise, scales_of
from quire.kernels.pages import LayerPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.reference import ReferenceBackend
from quire.kernels.scoring import Scoring
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [(1, 9), (6, 6), (1, 0), (1, 30), (3, 19), (1, 1), (18, 23)]


def in_fp8(cache: Tensor, device: str) -> Tensor:
    """A pool with the same content, as far as fp8 can hold it; what is NaN stays so."""
    blocks, layers, _, kv_heads, block_size, head_dim = cache.shape
    layout = KVLayout.plain(layers, kv_heads, head_dim, block_size, FP8)
    pool = PagedKVCache(layout, blocks, torch.device("cpu"), ReferenceBackend())
    values, scales = quantise(cache)
    pool.tensor.copy_(values)
    scales_of(pool.tensor).copy_(scales)
    moved = PagedKVCache(layout, blocks, torch.device(device), ReferenceBackend())
    moved.images.copy_(pool.images)
    return moved.tensor


def on_cpu(cache: Tensor) -> Tensor:
    """The pool and its scales, moved."""
    blocks, layers, _, kv_heads, block_size, head_dim = cache.shape
    layout = KVLayout.plain(layers, kv_heads, head_dim, block_size, FP8)
    pool = PagedKVCache(layout, blocks, torch.device("cpu"), ReferenceBackend())
    pool.tensor.copy_(cache.cpu())
    scales_of(pool.tensor).copy_(scales_of(cache).cpu())
    return pool.tensor


@pytest.fixture
def on_gpu_kernels(subject):
    if subject.backend.name != "triton":
        pytest.skip("fp8 is for GPUs")
    return subject


def check_written(subject, cache: Tensor, expected: Tensor, close: float = 1e-6) -> None:
    """The same scales, and values that differ by a rounding at most; unwritten slots untouched."""
    torch.testing.assert_close(
        scales_of(cache), scales_of(expected), rtol=close, atol=close, equal_nan=True
    )
    got, wanted = cache.float(), expected.float()
    if subject.is_interpreted:
        # The interpreter forgets the carry where a number is rounded up to a power of two.
        got = torch.where((2 * got - wanted).abs() <= 0.13 * wanted.abs(), wanted, got)
    torch.testing.assert_close(got, wanted, rtol=0.13, atol=500 * close, equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 192])
def test_writes_and_attends(on_gpu_kernels, step, dtype, head_dim):
    if on_gpu_kernels.is_interpreted and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply bfloat16")
    made = step(LENGTHS, head_dim=head_dim, dtype=dtype)
    here = replace(made.on(on_gpu_kernels.device), cache=in_fp8(made.cache, on_gpu_kernels.device))
    out = here.run(on_gpu_kernels.backend)

    written = replace(made, cache=in_fp8(made.cache, "cpu"))
    ReferenceBackend().write_kv(written.pages, made.k, made.v, made.batch)
    after = on_cpu(here.cache)
    check_written(on_gpu_kernels, after, written.cache)
    wanted = replace(made, q=made.q.float(), cache=after).attend(ReferenceBackend())
    torch.testing.assert_close(out, wanted, rtol=0, atol=TOLERANCE[dtype])


def attended(subject, made, window=None):
    """What the kernels make of a step over KV in fp8, and what the reference makes of the same."""
    here = replace(made.on(subject.device), cache=in_fp8(made.cache, subject.device))
    out = here.run(subject.backend, window)
    stored = replace(made, q=made.q.float(), cache=on_cpu(here.cache))
    wanted = stored.attend(ReferenceBackend(), window)
    return out, wanted


@pytest.mark.parametrize(("group", "window"), [(1, 90), (4, None), (8, 90)])
def test_parts(on_gpu_kernels, step, group, window):
    lengths = [(16, 200), (1, 140), (2, 65)]
    dtype = torch.float16
    made = step(lengths, group=group, kv_heads=1, head_dim=64, window=window, dtype=dtype)
    out, wanted = attended(on_gpu_kernels, made, window)
    torch.testing.assert_close(out, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("group", "softcap", "has_sinks"), [(2, None, False), (8, 2.0, True)])
def test_many_decodes(on_gpu_kernels, step, group, softcap, has_sinks):
    """So many sequences that Hopper has a kernel of its own for them (`hopper_fp8_decode.py`)."""
    lengths = [(1, 1 + 7 * i) for i in range(20)]
    made = step(lengths, group=group, head_dim=128, block_size=16, dtype=torch.float16)
    sinks = 2 * torch.randn(2 * group) if has_sinks else None
    out, wanted = attended(on_gpu_kernels, replace(made, softcap=softcap, sinks=sinks))
    torch.testing.assert_close(out, wanted, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("lengths", "head_dim", "softcap", "has_sinks", "window"),
    [
        pytest.param(LENGTHS, 96, 2.0, True, None, id="96-all"),
        pytest.param(LENGTHS, 256, None, True, 9, id="256-sinks-window"),
        pytest.param([(1, 200), (2, 140)], 64, 2.0, True, 90, id="64-all-split"),
        pytest.param([(1, 200), (2, 140)], 128, 2.0, False, None, id="128-softcap-split"),
    ],
)
def test_scoring(on_gpu_kernels, step, lengths, head_dim, softcap, has_sinks, window):
    made = step(lengths, head_dim=head_dim, kv_heads=1, group=2, window=window)
    sinks = 2 * torch.randn(2) if has_sinks else None
    out, wanted = attended(on_gpu_kernels, replace(made, softcap=softcap, sinks=sinks), window)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


def test_values_narrower_than_keys(on_gpu_kernels, step):
    subject, heads, block_size, widths = on_gpu_kernels, 2, 8, (192, 128)
    made = step([(1, 1), (6, 6), (20, 20)], head_dim=192, v_dim=128).on(subject.device)
    sizes = [heads * block_size * width for width in widths]
    sizes += [heads * block_size * SCALE.itemsize] * len(widths)
    images = torch.zeros(len(made.cache), sum(sizes), dtype=torch.uint8, device=subject.device)

    def pages_in(images: Tensor) -> LayerPages:
        k, v, *scales = images.split(sizes, dim=1)
        shape = heads, block_size
        return LayerPages(
            *(part.view(FP8).unflatten(1, (*shape, -1)) for part in (k, v)),
            *(part.view(SCALE).unflatten(1, shape) for part in scales),
        )

    scoring = Scoring(made.scale)
    subject.backend.begin(made.batch)
    subject.backend.write_kv(pages_in(images), made.k, made.v, made.batch)
    out = subject.backend.paged_attention(made.q, pages_in(images), made.batch, scoring)
    there, written = made.on("cpu"), images.cpu()
    reference, expected = ReferenceBackend(), torch.zeros_like(written)
    reference.write_kv(pages_in(expected), there.k, there.v, there.batch)
    got, wanted = pages_in(written), pages_in(expected)
    torch.testing.assert_close(got.k_scales, wanted.k_scales)
    torch.testing.assert_close(got.v_scales, wanted.v_scales)
    attended = reference.paged_attention(there.q, got, there.batch, scoring)
    torch.testing.assert_close(out.cpu(), attended, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scales_far_apart(on_gpu_kernels, step, dtype):
    """Tokens whose V is tiny, huge or nothing beside the others': none of them is lost."""
    sizes = torch.tensor([1e-25, 1e-4, 1.0, 1e4, 0.0])
    for largest in (1, 4):
        made = step([(1, 70), (5, 20), (20, 40)], kv_heads=1, seed=largest)
        cache, v = made.cache.clone(), made.v.clone()
        which = torch.arange(cache.shape[4]) % (largest + 1)
        cache[:, :, 1] *= sizes[which][:, None]
        v *= sizes[torch.arange(len(v)) % (largest + 1)][:, None, None]
        made = replace(made, cache=cache, q=made.q.to(dtype), v=v)
        out, wanted = attended(on_gpu_kernels, made)
        size = sizes[: largest + 1].max()
        torch.testing.assert_close(out, wanted, rtol=0, atol=float(size * TOLERANCE[dtype]))


def test_values_of_nothing(on_gpu_kernels, step):
    made = step([(1, 20), (3, 9), (20, 20)], kv_heads=1)
    made = replace(made, cache=made.cache * 0, v=made.v * 0)
    out, _ = attended(on_gpu_kernels, made)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("window", [2, 9])
def test_windows(on_gpu_kernels, step, window):
    out, wanted = attended(on_gpu_kernels, step(LENGTHS, kv_heads=1, window=window), window)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_rotates_and_writes(on_gpu_kernels, step, normed):
    made = step(LENGTHS, head_dim=64, dtype=torch.bfloat16)
    device = on_gpu_kernels.device
    qkv = torch.cat((made.q, made.k, made.v), dim=1).flatten(1)
    angles = torch.rand(len(qkv), 1, 32) * 6
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    rotation = Rotation(*(part.to(torch.bfloat16) for part in rotation))
    heads = made.q.shape[1] + made.k.shape[1]
    weight = torch.randn(heads, 64).to(torch.bfloat16)
    scale = HeadScale(weight, 1e-6) if normed else None
    expected = in_fp8(made.cache, "cpu")
    wanted = ReferenceBackend().rotate_and_write(
        qkv, scale, rotation, replace(made, cache=expected).pages, made.batch
    )
    here = replace(made.on(device), cache=in_fp8(made.cache, device))
    on_gpu_kernels.backend.begin(here.batch)
    got = on_gpu_kernels.backend.rotate_and_write(
        qkv.to(device),
        None if scale is None else scale._replace(weight=weight.to(device)),
        Rotation(*(part.to(device) for part in rotation)),
        here.pages,
        here.batch,
    )
    torch.testing.assert_close(got.cpu().float(), wanted.float(), rtol=0.02, atol=0.02)
    after = on_cpu(here.cache)
    check_written(on_gpu_kernels, after, expected, close=0.01)


@pytest.mark.gpu
def test_long_prompts_and_contexts(step):
    from quire.kernels.triton import TritonBackend

    lengths = [(2500, 2500), (1, 6000), (2100, 4000), (1, 17)]
    made = step(lengths, head_dim=128, block_size=16, dtype=torch.bfloat16, kv_heads=1)
    here = replace(made.on("cuda"), cache=in_fp8(made.cache, "cuda"))
    out = here.run(TritonBackend())
    exact = replace(here, q=here.q.float(), cache=dequantise(here.cache, scales_of(here.cache)))
    backend = ReferenceBackend()
    backend.begin(exact.batch)
    wanted = exact.attend(backend)
    torch.testing.assert_close(out, wanted.cpu(), rtol=0, atol=2e-2)
