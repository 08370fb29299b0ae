"""The cases of `quire bench attention`: what they cost, and that they compute attention."""

from __future__ import annotations

import pytest
import torch

from quire.bench.kernels.attention_case import Case, Heads, read_case
from quire.bench.kernels.attention_pool import Pool
from quire.errors import ConfigError
from quire.kernels.reference import ReferenceBackend


@pytest.mark.parametrize(
    ("kind", "text", "case"),
    [
        ("decode", "64x4096", Case("decode", 64, 1, 4095)),
        ("decode", "9x20-1544", Case("decode", 9, 1, 1543, 20)),
        ("prefill", "16x1024", Case("prefill", 16, 1024, 0)),
        ("prefill", "1x2048+30720", Case("prefill", 1, 2048, 30_720)),
    ],
)
def test_cases_are_read(kind: str, text: str, case: Case) -> None:
    assert read_case(kind, text) == case


@pytest.mark.parametrize(
    "text", ["", "64", "0x5", "5x0", "4096x", "1x2+", "-1x3", "1×2", "2x5-4", "2x0-4"]
)
def test_what_is_no_case(text: str) -> None:
    with pytest.raises(ValueError):
        read_case("decode", text)


def test_bytes_and_operations() -> None:
    decode = read_case("decode", "64x4096")
    assert decode.kv_bytes(Heads(), itemsize=2) == 64 * 4096 * 8 * 128 * 2 * 2
    assert decode.operations(Heads()) == 64 * 4096 * 32 * 128 * 4
    seen = sum(30 + i + 1 for i in range(20))
    assert read_case("prefill", "2x20+30").operations(Heads(6, 3, 8)) == 2 * seen * 6 * 8 * 4


@pytest.mark.parametrize("text", ["2x20+30", "1x20", "1x50+3", "3x1+9"])
@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
def test_windows(text: str, window: int) -> None:
    """Counted position by position."""
    case, heads = read_case("prefill", text), Heads(6, 3, 8)
    seen, blocks = 0, set()
    for position in range(case.cached, case.context):
        reach = range(max(0, position + 1 - window), position + 1)
        seen += len(reach)
        blocks |= {each // 4 for each in reach}
    tokens = case.context - min(blocks) * 4
    assert case.operations(heads, window) == case.sequences * seen * 6 * 8 * 4
    assert case.kv_bytes(heads, 2, window, block_size=4) == case.sequences * tokens * 3 * 8 * 2 * 2


def test_different_lengths() -> None:
    case = read_case("decode", "5x20-1020")
    assert sorted(case.contexts) == [20, 270, 520, 770, 1020] != case.contexts
    assert case.kv_bytes(Heads(), itemsize=2) == 2600 * 8 * 128 * 2 * 2
    assert case.operations(Heads()) == 2600 * 32 * 128 * 4
    assert read_case("decode", "1x20-1020").contexts == [1020]
    with pytest.raises(ValueError):
        read_case("prefill", "5x20-1020")


def test_names() -> None:
    cases = [read_case("decode", "1x32768"), read_case("decode", "9x20-1544")]
    cases.append(read_case("prefill", "1x2048+30720"))
    names = ["decode 1 × 32,768", "decode 9 × 20 to 1,544", "prefill 1 × 2,048 behind 30,720"]
    assert list(map(str, cases)) == names


def small_pool(size: int = 64 << 10) -> Pool:
    cpu, heads = torch.device("cpu"), Heads(4, 2, 16)
    return Pool(heads, layers=2, block_size=4, size=size, device=cpu, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("decode", "3x9"),
        ("decode", "1x5+7"),
        ("decode", "4x1-13"),
        ("prefill", "3x9"),
        ("prefill", "1x5+7"),
    ],
)
def test_a_round_is_the_attention_of_each_layer(
    kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, reference = small_pool(), ReferenceBackend()
    attend, compared = pool.backend.paged_attention, []

    def compare(*args: object) -> torch.Tensor:
        out = attend(*args)  # type: ignore[arg-type]
        expected = reference.paged_attention(*args)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected)
        compared.append(args[1])
        return out

    monkeypatch.setattr(pool.backend, "paged_attention", compare)
    pool.prepared(read_case(kind, text))()
    assert compared == list(pool.cache.layers)


def test_blocks_are_scattered_and_nobody_shares_one() -> None:
    pool = small_pool()
    tables = pool._batch(read_case("decode", "3x9")).block_tables.flatten().tolist()
    assert len(set(tables)) == len(tables) == 9
    assert tables != sorted(tables)
    batch = pool._batch(read_case("decode", "4x1-13"))
    assert sorted(batch.contexts) == [1, 5, 9, 13]
    used = [
        block
        for table, context in zip(batch.block_tables.tolist(), batch.contexts, strict=True)
        for block in table[: -(-context // 4)]
    ]
    assert len(set(used)) == len(used) == 1 + 2 + 3 + 4


def test_a_case_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="needs 75 blocks and the pool has 32; raise --pool"):
        small_pool().check_room(read_case("decode", "3x100"))


def test_heads_that_cannot_share() -> None:
    with pytest.raises(ConfigError, match="--heads 9 cannot share --kv-heads 2 evenly"):
        Heads(9, 2)


def test_latents() -> None:
    """One vector for all heads, read once; of 576 numbers 512 are multiplied twice."""
    case, heads = read_case("decode", "3x50"), Heads.of_deepseek(4)
    assert case.kv_bytes(heads, itemsize=2) == 3 * 50 * 576 * 2
    assert case.operations(heads) == 3 * 50 * 4 * (576 + 512) * 2
    pool = Pool(heads, 2, 16, 4 << 20, torch.device("cpu"), torch.float32)
    assert pool.seconds(case) > 0
