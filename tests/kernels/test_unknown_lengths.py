"""A captured step: what the host knows of its lengths is not what the device finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.runner.graphs import GraphShape

TOLERANCE = 1e-5
STEPS = [
    [(1, 9), (16, 70), (3, 3)],
    [(1, 9), (1, 40), (1, 8), (1, 1)],
    [(25, 31)],
    [(2, 150), (17, 17), (1, 20), (0, 0)],
    [(16, 16), (16, 33)],
]


def with_lengths(step, shape: GraphShape, device: str):
    """The step in a recorded shape: spare sequences have no token, spare tokens no sequence."""
    batch, tokens = step.batch, len(step.q)
    spare = shape.sequences - len(batch.query_lens)
    pad = torch.nn.functional.pad
    padded = replace(
        batch,
        slot_mapping=pad(batch.slot_mapping, (0, shape.tokens - tokens), value=-1),
        block_tables=pad(batch.block_tables, (0, 0, 0, spare)),
        query_starts=pad(batch.query_starts, (0, spare), value=tokens),
        context_lens=pad(batch.context_lens, (0, spare)),
        query_lens=shape.query_lens,
        contexts=[200] * shape.sequences,
    )
    q, k, v = (pad(x, (0, 0, 0, 0, 0, shape.tokens - tokens)) for x in (step.q, step.k, step.v))
    return replace(step, batch=padded, q=q, k=k, v=v).on(device)


@pytest.mark.parametrize("window", [None, 20])
def test_any_step_that_fits(subject, step, window):
    if subject.backend.name != "triton":
        pytest.skip("only a GPU has graphs")
    for lengths in STEPS:
        made = step(lengths, kv_heads=1, window=window)
        padded = with_lengths(made, GraphShape(48, 5), subject.device)
        out = padded.run(subject.backend, window)[: len(made.q)]
        torch.testing.assert_close(out, made.expected(window), rtol=0, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_graph_replays_them_all(step, dtype):
    from quire.kernels.triton import TritonBackend

    backend, shape = TritonBackend(), GraphShape(48, 5)
    fits = {"kv_heads": 2, "group": 4, "head_dim": 128, "block_size": 16, "dtype": dtype}
    steps = [with_lengths(step(lengths, **fits), shape, "cuda") for lengths in STEPS]
    columns = max(made.batch.block_tables.shape[1] for made in steps)
    blocks = max(len(made.cache) for made in steps)
    pad = torch.nn.functional.pad
    buffers = replace(
        steps[0],
        cache=steps[0].cache.new_zeros(blocks, *steps[0].cache.shape[1:]),
        batch=replace(
            steps[0].batch,
            block_tables=torch.zeros(shape.sequences, columns, dtype=torch.int32, device="cuda"),
        ),
    )
    buffers.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffers.launch(backend)
    for lengths, made in zip(STEPS, steps, strict=True):
        table = made.batch.block_tables
        buffers.batch.block_tables.copy_(pad(table, (0, columns - table.shape[1])))
        buffers.cache[: len(made.cache)].copy_(made.cache)
        for name in ("slot_mapping", "query_starts", "context_lens"):
            getattr(buffers.batch, name).copy_(getattr(made.batch, name))
        for name in ("q", "k", "v"):
            getattr(buffers, name).copy_(getattr(made, name))
        graph.replay()
        expected = step(lengths, **fits).expected()
        tolerance = TOLERANCE if dtype == torch.float32 else 1e-2
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(out[: len(expected)].float().cpu(), expected, **close)
