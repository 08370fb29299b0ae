"""The limits, by arithmetic alone: with the H200's rates they are those that were published."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from quire.bench.engine.workloads import workload
from quire.bench.report.machine_rates import Rates
from quire.bench.report.roofline import (
    Limit,
    Roofline,
    fresh_chunks,
    head_values,
    layers_values,
    positions_seen,
)
from quire.layers.formats import AllDense
from quire.models.checkpoints.dummy import SHAPES
from quire.models.held import item_sizes
from quire.models.hf_config import read_hf_config
from quire.models.source import shapes

H200 = Rates(copy=4.28e12, matrix=790e12)


def roofline(shape: str, rates: Rates = H200) -> Roofline:
    config = read_hf_config(SHAPES[shape])
    sizes = item_sizes(config, torch.bfloat16)
    return Roofline(config, rates, sizes.others, 2, sizes.experts)


def nano_limit(shape: str) -> Limit:
    load = workload("nano")
    return roofline(shape).workload(fresh_chunks(load.prompts, 16), load.lengths)


@pytest.mark.parametrize(
    ("shape", "tokens_per_second", "parts"),
    [
        ("qwen3-0.6b", 36_048, (0.17, 0.31, 3.24)),
        ("qwen3-8b", 12_645, (2.55, 3.88, 4.16)),
        ("qwen3-30b-a3b", 7_659, (1.04, 13.68, 2.77)),
        ("deepseek-v2-lite", 15_119, (0.83, 7.16, 0.88)),
        ("gpt-oss-20b", 27_641, (1.11, 2.94, 0.79)),
    ],
)
def test_nano(shape: str, tokens_per_second: int, parts: tuple[float, ...]) -> None:
    limit = nano_limit(shape)
    assert workload("nano").output_tokens / limit.seconds == pytest.approx(tokens_per_second, 1e-3)
    assert (limit.prompts, limit.weights, limit.kv) == pytest.approx(parts, abs=0.006)


@pytest.mark.parametrize(
    ("shape", "ms"),
    [
        ("qwen3-0.6b", 0.28),
        ("qwen3-8b", 3.54),
        ("qwen3-30b-a3b", 1.42),
        ("deepseek-v2-lite", 1.15),
        ("gpt-oss-20b", 0.87),
    ],
)
def test_one_stream(shape: str, ms: float) -> None:
    assert 1e3 * roofline(shape).stream().seconds == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize(("shape", "ms"), [("qwen3-0.6b", 192), ("qwen3-8b", 977)])
def test_a_long_prompt(shape: str, ms: float) -> None:
    assert 1e3 * roofline(shape).prompt(32_768).seconds == pytest.approx(ms, rel=0.01)


def test_a_short_prompt_cannot_be_quicker_than_the_weights_are_read() -> None:
    roof = roofline("qwen3-8b")
    assert roof.prompt(1).seconds == roof.stream().seconds


def test_a_cached_prompt_is_one_token_of_weights_and_the_kv_of_all() -> None:
    limit = roofline("qwen3-8b").cached_prompt(16_384)
    assert limit.weights == roofline("qwen3-8b").stream().seconds
    assert limit.kv == pytest.approx(16_384 * 36 * 2 * 8 * 128 * 2 / 4.28e12)


def test_a_decode_step_is_bound_by_bytes_or_by_operations() -> None:
    roof = roofline("qwen3-8b")
    assert roof.weights(1) == roof.weights(100)
    assert roof.weights(1000) == pytest.approx(2 * roof.weights(500))


def test_a_workload_is_the_sum_of_its_steps() -> None:
    roof, lengths = roofline("qwen3-0.6b"), [(7, 3), (20, 1), (5, 6)]
    weights = kv = 0.0
    for step in range(1, 6):
        contexts = [inn + step for inn, out in lengths if out > step]
        weights += roof.weights(len(contexts))
        kv += sum(contexts) * 28 * 2 * 8 * 128 * 2 / 4.28e12
    limit = roof.workload([], lengths)
    assert (limit.prompts, limit.weights, limit.kv) == pytest.approx((0, weights, kv))


@pytest.mark.parametrize("window", [None, 1, 7, 30, 100])
def test_positions_seen(window: int | None) -> None:
    for start, stop in [(0, 0), (0, 1), (0, 50), (3, 9), (29, 31), (40, 60)]:
        seen = (min(p + 1, window or p + 1) for p in range(start, stop))
        assert positions_seen(start, stop, window) == sum(seen)


def test_layers_with_a_window_see_less() -> None:
    config = read_hf_config(SHAPES["qwen3-0.6b"])
    half = replace(config, windows=(100, None) * 14)
    full_kv = Roofline(config, H200, 2, 2).cached_prompt(1000).kv
    half_kv = Roofline(half, H200, 2, 2).cached_prompt(1000).kv
    assert half_kv == pytest.approx(full_kv * (1000 + 100) / 2000)


class TestWhatMustBeComputed:
    def test_without_caching_all_of_it(self) -> None:
        assert fresh_chunks([[1, 2, 3], [1, 2]], None) == [(0, 3), (0, 2)]

    def test_a_shared_prefix_once_in_whole_blocks(self) -> None:
        common = [9] * 10
        chunks = fresh_chunks([[*common, 1], [*common, 2, 3], [4]], 4)
        assert sorted(chunks) == [(0, 1), (0, 11), (8, 12)]

    def test_the_last_token_always(self) -> None:
        assert fresh_chunks([[1, 2, 3, 4]] * 2, 4) == [(0, 4), (3, 4)]

    def test_the_order_of_the_prompts_does_not_matter(self) -> None:
        r = random.Random(0)
        prompts = [[r.randint(0, 1) for _ in range(r.randint(1, 9))] for _ in range(30)]
        total = sum(stop - start for start, stop in fresh_chunks(prompts, 1))
        # Each distinct prefix once; a prompt that others begin with still computes its last token.
        prefixes = {tuple(p[:n]) for p in prompts for n in range(1, len(p) + 1)}
        repeated = len(prompts) - len(set(map(tuple, prompts)))
        assert total == len(prefixes) + repeated

    def test_the_prefix_workload(self) -> None:
        prompts = workload("prefix").prompts
        on, off = (
            sum(stop - start for start, stop in fresh_chunks(prompts, size)) for size in (16, None)
        )
        assert off == sum(map(len, prompts))
        assert off - on == 69 * 512


@pytest.mark.parametrize("shape", SHAPES)
def test_all_matrices_are_counted(shape: str) -> None:
    config = replace(read_hf_config(SHAPES[shape]), formats=AllDense())
    weights = [weight for weight in shapes(config).weights() if weight.same_as is None]
    sizes = [math.prod(weight.shape) for weight in weights if len(weight.shape) > 1]
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    count = config.experts.count if config.experts else 0
    assert layers_values(config, count) + head_values(config) == sum(sizes) - embedding
