"""What only a GPU can show: long contexts, huge pools, every tile shape, replay from a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import Activation
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import pages_of
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.reference import ReferenceBackend
from quire.kernels.scoring import Scoring

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def close(out, expected, dtype):
    """Within the tolerance for numbers about 1, and half a unit of the dtype for larger ones."""
    rtol = torch.finfo(dtype).eps if dtype != torch.float32 else 0
    torch.testing.assert_close(out, expected, rtol=rtol, atol=TOLERANCE[dtype])


@pytest.fixture
def backend():
    from quire.kernels.triton import TritonBackend

    return TritonBackend()


def check(backend, step, window=None):
    out = step.on("cuda").run(backend, window)
    close(out, step.expected(window), step.q.dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_long_contexts(backend, step, dtype, window):
    lengths = [(1, 8191), (1, 8192), (1, 8193), (1, 1), (70, 8192), (1, 4000)]
    shape = {"kv_heads": 1, "group": 4, "head_dim": 128, "block_size": 16}
    check(backend, step(lengths, dtype=dtype, window=window, **shape), window)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [100, 128, 1000])
def test_windows_of_many_sequences(backend, step, dtype, window):
    """As many as keep a GPU busy, whose windows are not split."""
    lengths = [(1, 1 + 20 * i) for i in range(80)]
    shape = {"kv_heads": 8, "group": 8, "head_dim": 64, "block_size": 16}
    made = step(lengths, dtype=dtype, window=window, **shape)
    check(backend, replace(made, sinks=torch.randn(64)), window)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
def test_tile_shapes(backend, step, dtype, head_dim):
    for group, block_size in ((1, 8), (3, 32), (8, 256), (24, 64)):
        lengths = [(1, 300), (40, 40), (3, 200), (1, 1), (17, 129)]
        shape = {"kv_heads": 2, "group": group, "head_dim": head_dim, "block_size": block_size}
        check(backend, step(lengths, dtype=dtype, **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_prompt(backend, dtype):
    """8,192 tokens at once, against torch's own attention."""
    tokens, kv_heads, group, head_dim, block_size = 8192, 2, 4, 128, 16
    torch.manual_seed(0)
    q = torch.randn(tokens, kv_heads * group, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, tokens, kv_heads, head_dim, device="cuda", dtype=dtype)
    blocks = torch.randperm(tokens // block_size, device="cuda", dtype=torch.int32)
    shape = (len(blocks), 1, 2, kv_heads, block_size, head_dim)
    cache = torch.full(shape, torch.nan, device="cuda", dtype=dtype)
    offsets = torch.arange(block_size, device="cuda")
    batch = AttentionBatch(
        slot_mapping=(blocks.long()[:, None] * block_size + offsets).flatten(),
        block_tables=blocks[None],
        query_starts=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        query_lens=[tokens],
        contexts=[tokens],
    )
    (pages,) = pages_of(cache)
    backend.begin(batch)
    backend.write_kv(pages, k, v, batch)
    out = backend.paged_attention(q, pages, batch, Scoring(0.1))
    heads = [x.float().transpose(0, 1) for x in (q, k, v)]
    heads[1:] = [x.repeat_interleave(group, dim=0) for x in heads[1:]]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.1)
    close(out.float(), expected.transpose(0, 1), dtype)


def test_a_pool_of_more_than_2_to_the_31_elements(backend, step):
    """The same step in a small pool and at the far end of a huge one."""
    made = step([(1, 20), (9, 9), (5, 30)], head_dim=128, block_size=16, dtype=torch.bfloat16)
    small = made.on("cuda")
    image = made.cache[0].numel()
    extra = 2**31 // image + 1
    huge = torch.full((extra + len(made.cache), *made.cache.shape[1:]), 7.0, dtype=torch.bfloat16)
    huge[extra:] = made.cache
    batch = replace(
        made.batch,
        slot_mapping=made.batch.slot_mapping + extra * 16,
        block_tables=made.batch.block_tables + extra,
    )
    moved = replace(made, cache=huge, batch=batch).on("cuda")
    assert torch.equal(moved.run(backend), small.run(backend))
    assert torch.equal(moved.cache[extra:].nan_to_num(), small.cache.nan_to_num())
    assert bool((moved.cache[:extra] == 7.0).all())
    last = len(huge) - 1
    source, target = torch.tensor([[extra + 1], [last]], device="cuda")
    backend.copy_blocks(moved.cache, source, target)
    assert torch.equal(moved.cache[last].nan_to_num(), moved.cache[extra + 1].nan_to_num())
    assert bool((moved.cache[:extra] == 7.0).all())


def test_rotation_writes_at_the_far_end_of_a_huge_pool(backend, step):
    made = step([(1, 20), (9, 9)], head_dim=128, block_size=16, dtype=torch.bfloat16).on("cuda")
    qkv = torch.cat((made.q, made.k, made.v), dim=1)
    scale = HeadScale(torch.rand_like(qkv[0, : -made.k.shape[1]]), 1e-6)
    qkv = qkv.flatten(1)
    rotation = Rotation(*torch.rand(2, len(qkv), 1, 128, dtype=qkv.dtype, device="cuda"))
    extra = 2**31 // made.cache[0].numel() + 1
    huge = made.cache.new_full((extra + len(made.cache), *made.cache.shape[1:]), 7.0)
    huge[extra:] = made.cache
    far = replace(made.batch, slot_mapping=made.batch.slot_mapping + extra * 16)
    moved = replace(made, cache=huge, batch=far)
    q = backend.rotate_and_write(qkv, scale, rotation, made.pages, made.batch)
    assert torch.equal(backend.rotate_and_write(qkv, scale, rotation, moved.pages, far), q)
    assert torch.equal(huge[extra:].nan_to_num(), made.cache.nan_to_num())
    assert bool((huge[:extra] == 7.0).all())


def test_token_ops_replay_from_a_graph(backend, step):
    made = step([(1, 20), (1, 9)], head_dim=64, dtype=torch.bfloat16).on("cuda")
    qkv = torch.cat((made.q, made.k, made.v), dim=1).flatten(1)
    rotation = Rotation(*torch.rand(2, len(qkv), 1, 64, dtype=qkv.dtype, device="cuda"))
    stream, delta = torch.randn(2, 2, 96, dtype=qkv.dtype, device="cuda")
    weight, start = torch.rand_like(stream[0]), stream.clone()

    def run():
        q = backend.rotate_and_write(qkv, None, rotation, made.pages, made.batch)
        normed = backend.add_rms_norm(stream, delta, weight, 1e-6)
        return q, normed, backend.act_and_mul(delta, Activation.GELU_TANH)

    expected = [part.clone() for part in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    stream.copy_(start)
    graph.replay()
    for ours, theirs in zip(replayed, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_decode_replays_from_a_graph_as_sequences_grow(backend, step):
    """Captured for four rows at one length, replayed at others, with rows that are padding."""
    made = step([(1, 40), (1, 33), (1, 60), (1, 9)], block_size=16).on("cuda")
    decode = made.batch
    made.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.launch(backend)
    for contexts in ([40, 33, 60, 9], [25, 17, 0, 0], [1, 16, 48, 3]):
        decode.context_lens.copy_(torch.tensor(contexts))
        slots = [
            int(decode.block_tables[s, (c - 1) // 16]) * 16 + (c - 1) % 16 if c else -1
            for s, c in enumerate(contexts)
        ]
        decode.slot_mapping.copy_(torch.tensor(slots))
        expected = made.on("cpu").run(ReferenceBackend())
        graph.replay()
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-5)
