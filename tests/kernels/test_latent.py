"""Latent attention (MLA) on every backend, against the reference: written, absorbed, expanded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from latent_steps import make_step

from quire.kernels.plain import Rotation, rms_norm, rotate
from quire.kernels.reference import ReferenceBackend

TOLERANCE = 1e-5
MIXES = [
    [(1, 1)],
    [(1, 9), (1, 40), (1, 300), (1, 4)],
    [(5, 5), (1, 70), (3, 50), (16, 31)],
    [(40, 40), (1, 20), (25, 70), (2, 3)],
    [(1, 0), (1, 17)],  # the first of no sequence
]


@pytest.mark.parametrize("lengths", MIXES, ids=str)
@pytest.mark.parametrize(("heads", "block_size"), [(4, 4), (3, 16), (20, 8)])
def test_absorbed(subject, batch_of, lengths, heads, block_size):
    step = make_step(batch_of, lengths, heads, block_size=block_size)
    out = step.on(subject.device, torch.float32).attend(subject.backend)
    torch.testing.assert_close(out.cpu(), step.expected(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_absorbed_at_random(subject, batch_of, seed):
    chance = random.Random(seed)
    lengths = []
    for _ in range(chance.randint(1, 5)):
        new = chance.choice([1, 1, 1, 2, 7, 33])
        lengths.append((new, new + chance.randint(0, 90)))
    sizes = {
        "heads": chance.choice([1, 2, 5, 16, 40]),
        "rank": chance.choice([8, 16, 24]),
        "rope": chance.choice([4, 8]),
        "block_size": chance.choice([1, 4, 16, 24]),
    }
    step = make_step(batch_of, lengths, seed=seed, **sizes)
    out = step.on(subject.device, torch.float32).attend(subject.backend)
    torch.testing.assert_close(out.cpu(), step.expected(), rtol=0, atol=TOLERANCE)


def test_written(subject, batch_of):
    """Normalised, turned, and in their slots; of a row without a slot the query alone is turned."""
    made = make_step(batch_of, [(5, 9), (1, 0), (1, 6)])
    step = made.on(subject.device, torch.float32)
    angles = torch.randn(len(made.q), 4)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    rotation = Rotation(cos.unsqueeze(1), sin.unsqueeze(1))
    weight = torch.randn(made.rank)
    moved = Rotation(*(x.to(subject.device) for x in rotation))
    turned = step.write(subject.backend, moved, weight.to(subject.device))
    expected = rotate(made.q[..., made.rank :], rotation)
    torch.testing.assert_close(turned.cpu(), expected, rtol=0, atol=TOLERANCE)

    latents, k_rope = made.latents.split((made.rank, 8), dim=1)
    k_rope = rotate(k_rope.unsqueeze(1), rotation).squeeze(1)
    expected = torch.cat((rms_norm(latents, weight, 1e-6), k_rope), dim=1)
    pool = made.pool.clone()
    for latent, slot in zip(expected, made.batch.slot_mapping.tolist(), strict=True):
        if slot >= 0:
            pool[slot // 4, 1, slot % 4] = latent
    torch.testing.assert_close(step.pool.cpu(), pool, rtol=0, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("lengths", [[(40, 40)], [(70, 150), (33, 33), (5, 64)]], ids=str)
@pytest.mark.parametrize(("heads", "nope", "rope", "values"), [(3, 8, 4, 8), (2, 16, 8, 24)])
def test_expanded(subject, batch_of, lengths, heads, nope, rope, values):
    torch.manual_seed(0)
    tokens, context = (sum(each) for each in zip(*lengths, strict=True))
    batch = batch_of(lengths, [[0]] * len(lengths), [-1] * tokens)
    q = torch.randn(tokens, heads, nope + rope)
    kv, k_rope = torch.randn(context, heads, nope + values), torch.randn(context, rope)
    expected = ReferenceBackend().expanded_attention(q, kv, k_rope, batch, 0.2)
    names = ("slot_mapping", "block_tables", "query_starts", "context_lens")
    moved = replace(batch, **{name: getattr(batch, name).to(subject.device) for name in names})
    subject.backend.begin(moved)
    given = (x.to(subject.device) for x in (q, kv, k_rope))
    out = subject.backend.expanded_attention(*given, moved, 0.2)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sizes_of_deepseek(subject, batch_of, heads, dtype):
    """Where tensor cores multiply: on Hopper GPUs kernels of their own for 64 rows and more."""
    if subject.device != "cuda":
        pytest.skip("for a GPU's own kernels")
    lengths = [(1, 1), (1, 63), (3, 200), (1, 0), (1, 1000), (5, 5), (20, 90)]
    step = make_step(batch_of, lengths, heads, rank=512, rope=64, block_size=16)
    step = replace(step, scale=576**-0.5).on("cuda", dtype)
    out = step.attend(subject.backend).float().cpu()
    torch.testing.assert_close(out, step.on("cpu", torch.float32).expected(), rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("block_size", [16, 24, 64])
def test_many_rows_over_long_contexts(subject, batch_of, block_size, heads):
    """Long and short, of odd and even numbers of tiles, one split and several."""
    if subject.device != "cuda":
        pytest.skip("for a GPU's own kernels")
    lengths = [(1, 1), (1, 64), (3, 200), (1, 0), (1, 5000), (2, 129), (1, 128), (5, 700)]
    step = make_step(batch_of, lengths, heads, rank=512, rope=64, block_size=block_size)
    step = replace(step, scale=576**-0.5).on("cuda", torch.bfloat16)
    out = step.attend(subject.backend).float().cpu()
    torch.testing.assert_close(out, step.on("cpu", torch.float32).expected(), rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_prompts_of_deepseek(subject, batch_of, dtype):
    if subject.device != "cuda":
        pytest.skip("for a GPU's own kernels")
    torch.manual_seed(0)
    lengths = [(130, 130), (1, 300), (200, 517), (128, 128)]
    tokens, context = (sum(each) for each in zip(*lengths, strict=True))
    batch = batch_of(lengths, [[0]] * len(lengths), [-1] * tokens)
    q = torch.randn(tokens, 3, 192).to(dtype)
    kv, latents = torch.randn(context, 3, 256).to(dtype), torch.randn(context, 576).to(dtype)
    scale = 192**-0.5
    wide = (x.float() for x in (q, kv, latents[:, 512:]))
    expected = ReferenceBackend().expanded_attention(*wide, batch, scale)
    names = ("slot_mapping", "block_tables", "query_starts", "context_lens")
    moved = replace(batch, **{name: getattr(batch, name).cuda() for name in names})
    subject.backend.begin(moved)
    out = subject.backend.expanded_attention(
        q.cuda(), kv.cuda(), latents.cuda()[:, 512:], moved, scale
    )
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0, atol=2e-2)
