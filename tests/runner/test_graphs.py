"""Decode from graphs: the same numbers as without, nothing written but what is mapped."""

from __future__ import annotations

import random

import pytest
import torch

from quire import LLM, SamplingParams
from quire.runner.attention_clock import AttentionClock
from quire.runner.graphs import graph_shapes, graph_sizes

SETTINGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 512,
    "num_blocks": 256,
    "max_num_seqs": 37,  # a multiple of nothing
    "use_tqdm": False,
}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 37, 64, 256, 512, 1000])
def test_sizes_grow_up_to_the_most_and_leave_few_spare_rows(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        taken = min(size for size in sizes if size >= rows)
        assert taken - rows <= max(rows // 2, 7)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 16), (3, 2), (37, 512)])
def test_shapes_stay_within_the_limits_and_add_up(sequences: int, tokens: int) -> None:
    shapes = graph_shapes(sequences, tokens)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.tokens <= tokens and 1 <= shape.sequences <= sequences
        assert len(shape.query_lens) == shape.sequences and sum(shape.query_lens) == shape.tokens
        assert shape.is_decode == (set(shape.query_lens) == {1})


def test_small_steps_expect_sequences_with_few_new_tokens_and_with_many() -> None:
    for shape in graph_shapes(64, 512):
        if not shape.is_decode:
            assert any(1 < length <= 16 for length in shape.query_lens)
            assert shape.tokens == 16 or max(shape.query_lens) > 16


@pytest.fixture(scope="module")
def recorded():
    with LLM("qwen3-0.6b", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def eager():
    with LLM("qwen3-0.6b", enforce_eager=True, **SETTINGS) as llm:
        assert llm.engine.runner.graphs is None
        yield llm


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    choose = random.Random(count)
    return [
        [choose.randint(0, 9999) for _ in range(choose.randint(1, longest))] for _ in range(count)
    ]


def tokens(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replayed_equals_eager_at_every_batch_size(recorded, eager, temperature):
    """Of few tokens: between the 151,936 of random weights, all about as likely, rounding draws."""
    params = SamplingParams(
        temperature=temperature, top_k=20, seed=5, max_tokens=6, ignore_eos=True
    )
    for count in [*range(1, 38, 3), 37]:
        asked = prompts(count)
        assert tokens(recorded, asked, params) == tokens(eager, asked, params), count


@pytest.mark.gpu
def test_attention_of_replayed_steps_is_timed_now_and_then(recorded):
    """What a graph has recorded is launched piece by piece: the tokens are the same."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain, runner = tokens(recorded, prompts(5), params), recorded.engine.runner
    noted, usual = [], runner.clock
    device = runner.device
    runner.clock = AttentionClock(device, noted.append, every=3600, replayed_every=0.0)
    runner.clock.over(runner.cache.backend)  # so that no step beside replays is timed
    recorded.reset_prefix_cache()
    try:
        for _ in range(20):  # of a GPU that others use, too, events may not be over in time
            assert tokens(recorded, prompts(5), params) == plain
            if len(noted) > 28:  # the layers of several decodes
                break
    finally:
        runner.clock = usual
    assert len(noted) > 28 and min(noted) > 0


@pytest.mark.gpu
def test_a_narrow_table_after_a_wide_one_reads_no_stale_column(recorded, eager):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wide, narrow = prompts(6, 400), prompts(7, 20)
    tokens(recorded, wide, params)
    assert tokens(recorded, narrow, params) == tokens(eager, narrow, params)


@pytest.mark.gpu
def test_only_mapped_slots_are_written_at_every_batch_size(recorded):
    """A sentinel in every slot, the last one of the pool included, that no spare row may touch."""
    recorded.reset_prefix_cache()
    engine, cache = recorded.engine, recorded.engine.runner.cache
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for count in range(1, 38):
        cache.tensor.fill_(7.0)
        launched, launch = [], engine.runner.launch
        engine.runner.launch = lambda plan: launched.append(plan) or launch(plan)  # noqa: B023
        tokens(recorded, prompts(count, 12), params)
        engine.runner.launch = launch
        mapped = torch.zeros(256, 16, dtype=torch.bool)
        for plan in launched:
            rows = zip(plan.tables[0].block_tables, plan.starts, plan.counts, strict=True)
            for table, start, number in rows:
                for position in range(start, start + number):
                    mapped[table[position // 16], position % 16] = True
        touched = (cache.tensor != 7.0).any(dim=(1, 2, 3, 5)).cpu()
        assert torch.equal(touched, mapped), count
        recorded.reset_prefix_cache()


@pytest.mark.gpu
def test_decoding_never_waits_for_the_device(recorded):
    engine = recorded.engine
    for i, prompt in enumerate(prompts(9)):
        params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40 * (i % 2), max_tokens=40)
        engine.add_request(f"r{i}", prompt, params)
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for i in range(9):
            engine.abort_request(f"r{i}")
