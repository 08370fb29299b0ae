"""A layer's attention: its own pages, the batch of its KV group, and what it asks for."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged import attention_batch

from quire.kernels.backend import backend_for
from quire.kernels.pages import pages_of
from quire.kernels.plain import Rotation
from quire.kernels.reference import ReferenceBackend
from quire.kernels.scoring import Scoring
from quire.layers.attention import Attention, Sinks, Step
from quire.layers.tp import SINGLE

BLOCK_SIZE, HEADS, WIDTH = 4, 4, 32


def rotation_of(tokens: int) -> Rotation:
    cos, sin = torch.randn(2, tokens, 1, WIDTH)
    return Rotation(cos, sin)


def test_layers_of_two_groups():
    """The groups' tables name blocks of one pool, and each layer scores in its own way."""
    torch.manual_seed(0)
    cached, new = [6, 0], [1, 5]
    full = attention_batch([[3, 0], [5, 1]], cached, new, BLOCK_SIZE)
    window = attention_batch([[2, 7], [4, 6]], cached, new, BLOCK_SIZE)
    pool = torch.randn(8, 2, 2, 2, BLOCK_SIZE, WIDTH)
    sinks = Sinks(HEADS, SINGLE)
    sinks.scores.normal_()
    layers = [
        Attention(0, 0.3),
        Attention(1, 0.2, window=3, softcap=1.5, sinks=sinks),
    ]
    qkv, rotation = torch.randn(2, 6, (HEADS + 2 + 2) * WIDTH), rotation_of(6)
    of_full, of_window = pages_of(pool.clone())
    grouped = (of_full, replace(of_window, group=1))
    step = Step((full, window), grouped, backend_for(torch.device("cpu")))
    found = [layer(x, None, rotation, step) for layer, x in zip(layers, qkv, strict=True)]

    plain, pages = ReferenceBackend(), pages_of(pool)
    asked = [(full, Scoring(0.3)), (window, Scoring(0.2, 3, 1.5, sinks.scores))]
    for i, (batch, scoring) in enumerate(asked):
        q = plain.rotate_and_write(qkv[i], None, rotation, pages[i], batch)
        torch.testing.assert_close(found[i], plain.paged_attention(q, pages[i], batch, scoring))


def test_a_step_begins_a_pass():
    """The same batch may have other lengths on the device: nothing of the last pass is used."""
    backend = backend_for(torch.device("cpu"))
    batch = attention_batch([[1]], [2], [1], BLOCK_SIZE)
    pages = pages_of(torch.randn(2, 1, 2, 2, BLOCK_SIZE, WIDTH))
    Step((batch,), pages, backend)
    first = batch.plan.content
    Step((batch,), pages, backend)
    assert batch.plan.content is not first
