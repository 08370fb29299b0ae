"""What every attention backend must do, held against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.kernels.reference import ReferenceBackend

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(subject, step, window=None):
    out = step.on(subject.device).run(subject.backend, window)
    torch.testing.assert_close(out, step.expected(window), rtol=0, atol=TOLERANCE[step.q.dtype])


def edges(block_size, query_len):
    """Contexts on, just before and just after the ends of blocks."""
    around = (block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1)
    return [(min(query_len, context), context) for context in around]


class TestAttention:
    @pytest.mark.parametrize(
        "lengths",
        [
            pytest.param([(1, 1)], id="one-token"),
            pytest.param([(5, 5)], id="one-prompt"),
            pytest.param([(1, 9), (1, 1), (1, 30), (1, 8)], id="decode"),
            pytest.param([(3, 3), (20, 20), (2, 2)], id="prompts"),
            pytest.param([(3, 11), (8, 16), (9, 40), (2, 41)], id="cached-prefix"),
            pytest.param([(1, 17), (6, 6), (1, 1), (5, 21), (1, 8)], id="mixed"),
            pytest.param([(0, 0), (1, 9), (0, 12), (4, 7), (0, 0)], id="nothing-new"),
            pytest.param([(1, 17), (18, 18), (3, 9), (25, 30), (16, 40)], id="many-and-few"),
            pytest.param([(1, 5), (1, 0), (1, 0)], id="padded-rows"),
            pytest.param([(0, 0)], id="empty"),
        ],
    )
    @pytest.mark.parametrize("window", [None, 6])
    def test_mixes_of_sequences(self, subject, step, lengths, window):
        kv_heads = 1 if subject.is_interpreted else 2
        check(subject, step(lengths, kv_heads=kv_heads, window=window), window)

    @pytest.mark.parametrize("block_size", [8, 16, 128])
    @pytest.mark.parametrize("query_len", [1, 7, 20])
    def test_block_edges(self, subject, step, block_size, query_len):
        lengths = edges(block_size, query_len)
        check(subject, step(lengths, block_size=block_size, kv_heads=1))

    @pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 80), (4, 16), (8, 128), (5, 192)])
    def test_heads(self, subject, step, group, head_dim):
        lengths = [(1, 12), (6, 13), (18, 21)]
        check(subject, step(lengths, group=group, head_dim=head_dim, kv_heads=1))

    @pytest.mark.parametrize("window", [1, 2, 8, 9, 40])
    def test_windows(self, subject, step, window):
        lengths = [(1, 8), (1, 21), (12, 12), (5, 33), (1, 1), (19, 31)]
        check(subject, step(lengths, kv_heads=1, window=window), window)

    def test_more_rows_than_a_tile(self, subject, step):
        lengths = [(70, 70), (1, 70), (66, 130)]
        for window in (None, 50):
            check(subject, step(lengths, kv_heads=1, window=window), window)

    def test_rows_that_see_nothing_of_the_first_keys_of_their_tile(self, subject, step):
        made = step([(130, 130)], kv_heads=1, group=1, window=5, dtype=torch.float16)
        check(subject, made, 5)

    def test_long_decodes_in_parts(self, subject, step):
        lengths = [(1, 500), (1, 3), (1, 64), (1, 129)]
        for window in (None, 200):
            check(subject, step(lengths, kv_heads=1, window=window), window)

    @pytest.mark.parametrize(
        ("group", "window"), [(1, None), (1, 130), (3, 5), (4, None), (8, None), (8, 130)]
    )
    def test_few_new_tokens_behind_long_contexts(self, subject, step, group, window):
        """Some tokens see nothing of a split: it lies behind them, or before their window."""
        lengths = [(16, 270), (2, 2), (1, 70), (17, 60), (9, 129)]
        made = step(lengths, kv_heads=1, group=group, window=window)
        check(subject, made, window)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_few_new_tokens_in_half_precision(self, subject, step, dtype):
        if subject.is_interpreted and dtype == torch.bfloat16:
            pytest.skip("the interpreter computes with numpy, which has no bfloat16")
        for group in (4, 8):  # a program has all rows, or half of them
            made = step([(16, 130), (3, 9), (1, 66)], kv_heads=1, group=group, dtype=dtype)
            check(subject, made)

    def test_few_new_tokens_in_a_crowd(self, subject, step):
        check(subject, step([(1, 3)] * 64 + [(3, 9), (2, 2)], kv_heads=1, group=1))

    @pytest.mark.parametrize("seed", range(8))
    def test_random_steps(self, subject, step, seed):
        draw = random.Random(seed)
        largest = 24 if subject.is_interpreted else 300
        window = draw.choice([None, None, draw.randint(1, 40)])
        lengths = []
        for _ in range(draw.randint(1, 4 if subject.is_interpreted else 12)):
            context = draw.randint(0, largest)
            query_len = draw.choice([min(1, context), draw.randint(0, context), context])
            lengths.append((query_len, context))
        made = step(
            lengths,
            kv_heads=draw.randint(1, 3),
            group=draw.choice([1, 2, 3, 5, 8]),
            head_dim=draw.choice([16, 32, 64, 80, 96]),
            block_size=draw.choice([8, 16, 32, 128]),
            window=window,
            seed=seed,
        )
        check(subject, made, window)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, subject, step, dtype):
        if subject.is_interpreted and dtype == torch.bfloat16:
            pytest.skip("the interpreter computes with numpy, which has no bfloat16")
        check(subject, step([(1, 30), (9, 9), (4, 20), (1, 3), (19, 22)], dtype=dtype))

    def test_strided_views(self, subject, step):
        """q, k and v as a fused projection leaves them, by rows and transposed."""
        made = step([(1, 9), (6, 13), (17, 20)])
        tokens, dim = made.q.shape[0], made.q.shape[2]
        fused = torch.cat([made.q, made.k, made.v], dim=1).flatten(1)
        for projected in (fused, fused.t().contiguous().t()):
            heads = projected.view(tokens, -1, dim)
            q, k, v = heads.split([made.q.shape[1], 2, 2], dim=1)
            assert not q.is_contiguous()
            check(subject, replace(made, q=q, k=k, v=v))

    def test_a_sequence_reads_blocks_that_another_writes_in_the_same_step(
        self, subject, step, batch_of
    ):
        """Two prompts share two full blocks; only the first computes them."""
        made = step([(20, 20), (4, 20)])
        first, second = made.batch.block_tables[:, :3].tolist()
        shared = first[:2] + second[2:]
        lengths = [(20, 20), (4, 20)]
        batch = batch_of(lengths, [first, shared], made.batch.slot_mapping.tolist())
        cache = made.cache.clone()
        cache[second[:2]] = torch.nan
        check(subject, replace(made, batch=batch, cache=cache))

    def test_neighbours_do_not_matter(self, subject, step):
        crowd = step([(1, 19), (1, 40), (7, 12), (1, 3)], kv_heads=1)
        together = crowd.on(subject.device).run(subject.backend)
        row = 0
        for s, (query_len, context) in enumerate(
            zip(crowd.batch.query_lens, crowd.batch.contexts, strict=True)
        ):
            rows = slice(row, row + query_len)
            batch = replace(
                crowd.batch,
                slot_mapping=crowd.batch.slot_mapping[rows],
                block_tables=crowd.batch.block_tables[s : s + 1],
                query_starts=torch.tensor([0, query_len], dtype=torch.int32),
                context_lens=crowd.batch.context_lens[s : s + 1],
                query_lens=[query_len],
                contexts=[context],
            )
            alone = replace(crowd, batch=batch, q=crowd.q[rows], k=crowd.k[rows], v=crowd.v[rows])
            out = alone.on(subject.device).run(subject.backend)
            torch.testing.assert_close(out, together[rows], rtol=0, atol=2e-6)
            row += query_len

    def test_one_backend_serves_step_after_step(self, subject, step):
        """Nothing planned for one step, window or pool may be used for another."""
        steps = [
            step([(1, 9), (5, 5)], seed=seed, block_size=8 * (1 + seed % 2)) for seed in (1, 2)
        ]
        for made, window in zip(steps * 2, (None, 3, 3, None), strict=True):
            check(subject, made, window)


class TestWrite:
    def test_only_mapped_slots_change(self, subject, step):
        """The last slot is one of them; a slot below 0 is nowhere, not counted from the end."""
        made = step([(6, 6)])
        last = made.cache.shape[0] * made.cache.shape[4] - 1
        for slots in ([5, -1, last, 8, -1, 0], [3, -1, -2, 9, -last, 16], [-1] * 6, [*range(6)]):
            batch = replace(made.batch, slot_mapping=torch.tensor(slots))
            sentinel = torch.full_like(made.cache, 7.0)
            expected = sentinel.clone()
            wanted = replace(made, batch=batch, cache=expected)
            ReferenceBackend().write_kv(wanted.pages, made.k, made.v, batch)
            moved = replace(made, batch=batch, cache=sentinel).on(subject.device)
            subject.backend.begin(moved.batch)
            subject.backend.write_kv(moved.pages, moved.k, moved.v, moved.batch)
            assert torch.equal(moved.cache.cpu(), expected)

    def test_a_token_lands_where_its_slot_says(self, subject, step):
        made = step([(1, 1)])
        batch = replace(made.batch, slot_mapping=torch.tensor([2 * 8 + 5]))
        moved = replace(made, batch=batch, layer=0).on(subject.device)
        subject.backend.begin(moved.batch)
        subject.backend.write_kv(moved.pages, moved.k, moved.v, moved.batch)
        assert torch.equal(moved.cache[2, 0, 0, :, 5], moved.k[0])
        assert torch.equal(moved.cache[2, 0, 1, :, 5], moved.v[0])


class TestCopy:
    def test_whole_images_move(self, subject):
        cache = torch.randn(9, 3, 2, 2, 8, 16)
        sources, targets = torch.tensor([1, 8, 1]), torch.tensor([0, 4, 7])
        expected = cache.clone()
        ReferenceBackend().copy_blocks(expected, sources, targets)
        assert torch.equal(expected[4], cache[8])
        moved = cache.to(subject.device, copy=True)
        subject.backend.copy_blocks(moved, sources.to(subject.device), targets.to(subject.device))
        assert torch.equal(moved.cpu(), expected)

    def test_ids_may_be_columns_of_a_table(self, subject):
        cache = torch.randn(9, 3, 2, 2, 8, 16)
        pairs = torch.tensor([[1, 0], [8, 4], [1, 7], [3, 5]])
        moved = cache.to(subject.device, copy=True)
        subject.backend.copy_blocks(moved, *pairs.to(subject.device).unbind(1))
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
        assert torch.equal(moved.cpu(), cache)

    def test_nothing_to_copy(self, subject):
        cache = torch.randn(2, 1, 2, 1, 8, 16).to(subject.device)
        nothing = torch.tensor([], dtype=torch.int64, device=subject.device)
        before = cache.clone()
        subject.backend.copy_blocks(cache, nothing, nothing)
        assert torch.equal(cache, before)
