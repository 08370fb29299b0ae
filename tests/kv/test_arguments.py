"""What is given to `quire.kv` is checked before a byte moves; one sentence says what to give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE_S

from quire.errors import ConfigError, KVError
from quire.kv import ImagePool, KVStore, Namespace, TierMatch, open_store

BLOCK = 4
NAMESPACE = Namespace("model", "float16", "float16", BLOCK, "layout", "rope")
TOKENS = list(range(4 * BLOCK))


@pytest.fixture
def pool() -> ImagePool:
    return ImagePool(torch.randint(256, (8, 4096), dtype=torch.uint8))


@pytest.fixture
def store(pool: ImagePool) -> Iterator[KVStore]:
    store = open_store(pool, NAMESPACE, host_cache_bytes="1MiB")
    yield store
    assert store.flush(PATIENCE_S)
    assert not store.host.stats()["held"]
    store.close()


class TestPools:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
    def test_of_another_type(self, dtype: torch.dtype) -> None:
        with pytest.raises(ConfigError, match=r"is bytes .* give kv\.view"):
            ImagePool(torch.zeros(8, 64, dtype=dtype))

    @pytest.mark.parametrize("shape", [(8,), (8, 2, 4), (2, 8, 4, 2, 4)])
    def test_of_other_dimensions(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="of two dimensions"):
            ImagePool(torch.zeros(shape, dtype=torch.uint8))

    def test_of_strides_that_are_no_rows(self) -> None:
        blocks = torch.zeros(64, 8, dtype=torch.uint8)
        for images in (blocks.t(), blocks[:, ::2], blocks[:1].expand(8, -1)):
            with pytest.raises(ConfigError, match="side by side"):
                ImagePool(images)

    def test_rows_of_a_wider_tensor_are_a_pool(self) -> None:
        wide = torch.arange(8 * 8192).view(8, 8192).to(torch.uint8)
        pool = ImagePool(wide[:, 100 : 100 + 4096])
        wanted = pool.images[:4].clone()
        store = open_store(pool, NAMESPACE, host_cache_bytes=1 << 20)
        store.put(TOKENS, [0, 1, 2, 3]).wait(PATIENCE_S)
        load = store.match(TOKENS).load([4, 5, 6, 7])
        assert load.wait(PATIENCE_S) and load.num_loaded == 4
        assert torch.equal(pool.images[4:], wanted)
        store.close()

    def test_that_hold_nothing(self) -> None:
        for shape in ((0, 64), (8, 0)):
            with pytest.raises(ConfigError, match="holds nothing"):
                ImagePool(torch.zeros(shape, dtype=torch.uint8))

    def test_images_larger_than_blocks(self) -> None:
        with pytest.raises(ConfigError, match="does not fit blocks of 64"):
            ImagePool(torch.zeros(8, 64, dtype=torch.uint8), image_bytes=(64, 65))

    @pytest.mark.parametrize("sizes", [64, ["a"], [64.0], None, {64}])
    def test_what_are_no_sizes_of_images(self, sizes: Any) -> None:
        with pytest.raises(ConfigError, match="image_bytes is a list of sizes"):
            ImagePool(torch.zeros(8, 64, dtype=torch.uint8), image_bytes=sizes)

    @pytest.mark.parametrize("images", [None, 5, np.zeros((8, 64), np.uint8)])
    def test_what_is_no_tensor(self, images: Any) -> None:
        with pytest.raises(ConfigError, match="is over a tensor, not a"):
            ImagePool(images)

    def test_without_memory(self) -> None:
        with pytest.raises(ConfigError, match="Blocks on meta cannot be copied"):
            ImagePool(torch.zeros(8, 64, dtype=torch.uint8, device="meta"))


class TestBlocks:
    @pytest.mark.parametrize("blocks", [[0, 1, 2, 8], [0, 1, 2, -1], [0, 1, 2, 1 << 40]])
    def test_out_of_range(self, store: KVStore, blocks: list[int]) -> None:
        with pytest.raises(KVError, match="There is no block"):
            store.put(TOKENS, blocks)
        assert len(store.match(TOKENS)) == 0

    def test_out_of_range_of_a_load(self, store: KVStore, pool: ImagePool) -> None:
        assert store.put(TOKENS, [0, 1, 2, 3]).wait(PATIENCE_S)
        before = pool.images.clone()
        with pytest.raises(KVError, match="There is no block 9"):
            store.match(TOKENS).load([4, 5, 6, 9])
        assert torch.equal(pool.images, before)

    def test_too_few(self, store: KVStore) -> None:
        with pytest.raises(KVError, match="4 full blocks of tokens came with 3 block ids"):
            store.put(TOKENS, [0, 1, 2])

    def test_the_last_may_be_half_filled(self, store: KVStore) -> None:
        put = store.put([*TOKENS, 7], [0, 1, 2, 3, 4])
        assert put.wait(PATIENCE_S) and put.num_kept == 4

    @pytest.mark.parametrize("blocks", [[0, 1, 1, 2], np.array([3, 2, 1, 3])])
    def test_twice(self, store: KVStore, blocks: list[int]) -> None:
        with pytest.raises(KVError, match="is given twice"):
            store.put(TOKENS, blocks)

    def test_that_are_no_numbers(self, store: KVStore) -> None:
        with pytest.raises(KVError, match="whole numbers"):
            store.put(TOKENS, [0, 1, 2, 3.5])  # type: ignore[list-item]

    @pytest.mark.parametrize("blocks", [None, 5, {0, 1, 2, 3}, {0: 1}, torch.tensor(5)], ids=str)
    def test_that_are_no_list(self, store: KVStore, blocks: Any) -> None:
        with pytest.raises(KVError, match="Blocks are given as a list of ids"):
            store.put(TOKENS, blocks)
        assert store.put(TOKENS, [0, 1, 2, 3]).wait(PATIENCE_S)
        for load in (TierMatch.load, store.load_by_layer):
            with pytest.raises(KVError, match="Blocks are given as a list of ids"):
                load(store.match(TOKENS), blocks)

    def test_of_a_tensor_or_an_array(self, store: KVStore) -> None:
        for at, blocks in enumerate((torch.arange(4), np.arange(4, dtype=np.uint8))):
            put = store.put([at] * 4 * BLOCK, blocks)  # type: ignore[arg-type]
            assert put.wait(PATIENCE_S) and put.num_kept == 4


class TestTokens:
    @pytest.mark.parametrize("token", [-1, 1 << 31, (1 << 32) + 5, 1 << 70])
    def test_that_do_not_fit(self, store: KVStore, token: int) -> None:
        for ask in (store.match, lambda ids: store.put(ids, [0])):
            with pytest.raises(KVError, match="Token ids are"):
                ask([0, 1, 2, token])

    def test_a_wide_array_is_not_cut_to_other_tokens(self, store: KVStore) -> None:
        with pytest.raises(KVError, match="4294967301"):
            store.match(np.array([1, 2, 3, (1 << 32) + 5]))

    @pytest.mark.parametrize("ids", [[0.5] * 4, [[1, 2], [3, 4]], [True] * 4, "1234"])
    def test_that_are_no_row_of_numbers(self, store: KVStore, ids: object) -> None:
        with pytest.raises(KVError, match="one row of whole numbers"):
            store.match(ids)  # type: ignore[arg-type]

    def test_none_at_all(self, store: KVStore) -> None:
        match = store.match([])
        assert len(match) == 0 and match.ready()
        match.drop()


class TestSalts:
    @pytest.mark.parametrize("salt", [None, 5, b"acme", ["acme"]])
    def test_that_are_no_text(self, store: KVStore, salt: Any) -> None:
        control = store.control
        for use in (
            lambda: store.match(TOKENS, salt),
            lambda: store.match_tables(TOKENS, salt),
            lambda: store.put(TOKENS, [0, 1, 2, 3], salt),
            lambda: control.pin(TOKENS, 60, salt),
            lambda: control.delete(TOKENS, salt),
            lambda: control.delete_tenant(salt),
        ):
            with pytest.raises(KVError, match="A salt is text"):
                use()


class TestTimes:
    @pytest.mark.parametrize("seconds", ["x", None, float("nan"), float("inf")])
    def test_that_are_no_timeout(self, store: KVStore, seconds: Any) -> None:
        with pytest.raises(KVError, match="A timeout is a number of seconds"):
            store.flush(seconds)


class TestGroups:
    @pytest.fixture
    def groups(self) -> Iterator[KVStore]:
        images = ImagePool(torch.zeros(8, 4096, dtype=torch.uint8), image_bytes=(4096, 2048))
        store = open_store(images, NAMESPACE, host_cache_bytes="1MiB", windows=(None, 8))
        yield store
        store.close()

    @pytest.mark.parametrize(
        "tables", [[[0, 1, 2, 3]], [[0, 1, 2, 3, 4], [5, 6]], [[0, 1, 2, 3], [4], [5]]]
    )
    def test_tables_that_do_not_fit(self, groups: KVStore, tables: list[list[int]]) -> None:
        with pytest.raises(KVError, match="give one for each of 2 KV groups"):
            groups.put_tables(TOKENS, tables)

    def test_a_block_in_two_tables(self, groups: KVStore) -> None:
        with pytest.raises(KVError, match="Block 3 is given twice"):
            groups.put_tables(TOKENS, [[0, 1, 2, 3], [4, 3]])

    def test_windows_of_other_groups(self, pool: ImagePool) -> None:
        with pytest.raises(ConfigError, match="images of 1 KV groups has 2 windows"):
            open_store(pool, NAMESPACE, windows=(None, 8))

    @pytest.mark.parametrize("windows", [5, None, {16}])
    def test_windows_that_are_no_list(self, pool: ImagePool, windows: Any) -> None:
        with pytest.raises(ConfigError, match="windows is a list with one for each KV group"):
            open_store(pool, NAMESPACE, windows=windows)


class TestSettings:
    @pytest.mark.parametrize("given", [torch.zeros(8, 64, dtype=torch.uint8), None, [1]])
    def test_what_is_no_pool(self, given: Any) -> None:
        with pytest.raises(ConfigError, match="A store is over an ImagePool"):
            open_store(given, NAMESPACE, host_cache_bytes="1MiB")

    @pytest.mark.parametrize("given", [{"model": "model"}, None, "model"])
    def test_what_is_no_namespace(self, pool: ImagePool, given: Any) -> None:
        with pytest.raises(ConfigError, match="is said by a Namespace"):
            open_store(pool, given, host_cache_bytes="1MiB")

    def test_no_tier(self, pool: ImagePool) -> None:
        with pytest.raises(ConfigError, match="keeps nothing; give host_cache_bytes"):
            open_store(pool, NAMESPACE)

    def test_a_path_is_one_folder_whatever_its_name(self, pool: ImagePool, tmp_path: Path) -> None:
        folder = tmp_path / "cold, but large"
        open_store(pool, NAMESPACE, ssd_cache_dir=folder, ssd_cache_bytes="8MiB").close()
        assert folder.is_dir() and len(list(tmp_path.iterdir())) == 1

    @pytest.mark.parametrize("size", [15, 0, -16, 24, 2.5])
    def test_blocks_of_no_power_of_two(self, pool: ImagePool, size: int) -> None:
        namespace = Namespace("model", "float16", "float16", size, "layout", "rope")
        with pytest.raises(ConfigError, match="block_size must be a power of two"):
            open_store(pool, namespace)

    def test_sizes_are_said_as_to_the_engine(self, pool: ImagePool, tmp_path) -> None:
        disk = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "2MiB"}
        store = open_store(pool, NAMESPACE, host_cache_bytes="64KiB", **disk)
        assert store.host.capacity == 16 and [tier.name for tier in store.tiers] == ["ssd"]
        store.close()

    @pytest.mark.parametrize("size", ["1 potato", -1, 2.5, None])
    def test_what_is_no_size(self, pool: ImagePool, size: object) -> None:
        with pytest.raises(ConfigError, match="host_cache_bytes must be a size in bytes"):
            open_store(pool, NAMESPACE, host_cache_bytes=size)  # type: ignore[arg-type]

    @pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), "0.5", None])
    def test_what_is_no_share(self, pool: ImagePool, share: Any) -> None:
        with pytest.raises(ConfigError, match="tenant_cache_share must be above 0"):
            open_store(pool, NAMESPACE, host_cache_bytes="1MiB", tenant_cache_share=share)

    @pytest.mark.parametrize(
        "setting", [{"ssd_cache_dir": 5, "ssd_cache_bytes": "8MiB"}, {"remote_cache_url": 5}]
    )
    def test_what_is_no_text(self, pool: ImagePool, setting: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"is text,( or a Path,)? not 5"):
            open_store(pool, NAMESPACE, **setting)

    @pytest.mark.parametrize("window", [0, -1, "16"])
    def test_what_is_no_window(self, pool: ImagePool, window: Any) -> None:
        with pytest.raises(ConfigError, match="A window is a number of tokens"):
            open_store(pool, NAMESPACE, windows=[window])
