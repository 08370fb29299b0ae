"""A tenant's share of the SSD: on disk too, over restarts, and with a smaller one than before."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, image_of, keys, same
from faulty_disk import FaultyDisk, OneByOne
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tenant_blocks import blocks_of

from quire.errors import ConfigError
from quire.kv.image import NO_TENANT, BlockName
from quire.kv.keys import tenant_tag
from quire.kv.policy import LearnedPolicy, LRUPolicy
from quire.kv.tiers.ssd.catalog import Catalog, Taken
from quire.kv.tiers.ssd.geometry import INDEX_FILE, Geometry
from quire.kv.tiers.ssd.index_file import IndexFile
from quire.kv.tiers.ssd.records import RECORD, Held
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 5000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)
NOTHING = Held.among(0, np.zeros(0, RECORD))


def open_tier(folders: list[Path], slots: int, share: float = 1.0) -> SsdTier:
    quota = len(folders) * GEOMETRY.quota_for(slots // len(folders))
    return SsdTier(folders, quota, IMAGE_BYTES, BLOCK_SIZE, tenant_share=share, engine=OneByOne())


def write(tier: SsdTier, names: list[BlockName]) -> None:
    tier.use(keys(names))
    tier.write(names, [image_of(name, IMAGE_BYTES) for name in names])


def on_disk(folders: list[Path]) -> Counter[bytes]:
    """Blocks by tenant, as the files say it."""
    found: Counter[bytes] = Counter()
    for folder in folders:
        with open(folder / INDEX_FILE, "rb") as index:
            found.update(IndexFile(index.fileno()).read().tenants())
    return found


def is_whole(tier: SsdTier, names: list[BlockName]) -> list[bool]:
    images = empty(len(names), IMAGE_BYTES)
    there = tier.read(names, images)
    for name, image, found in zip(names, images, there, strict=True):
        assert not found or same([image], [image_of(name, IMAGE_BYTES)], IMAGE_BYTES)
    return there


def test_a_tenant_that_floods_keeps_to_its_share(tmp_path: Path) -> None:
    tier = open_tier([tmp_path], 12, 0.5)
    mine = blocks_of("b", 4)
    write(tier, mine)
    for salt in range(40):
        write(tier, blocks_of("a", 3, salt))
    assert is_whole(tier, mine) == [True] * 4
    assert on_disk([tmp_path]) == {tenant_tag("a"): 6, tenant_tag("b"): 4}
    tier.close()


def test_the_quota_is_known_after_a_restart(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    tier = open_tier(folders, 12, 0.5)
    mine = blocks_of("b", 4)
    write(tier, mine)
    write(tier, blocks_of("a", 6))
    tier.close()
    tier = open_tier(folders, 12, 0.5)
    for salt in range(1, 40):
        write(tier, blocks_of("a", 3, salt))
    assert is_whole(tier, mine) == [True] * 4
    assert on_disk(folders) == {tenant_tag("a"): 6, tenant_tag("b"): 4}
    tier.close()


def test_with_a_smaller_share_what_is_too_much_goes_when_it_is_opened(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    tier = open_tier(folders, 16)
    old, recent, mine = blocks_of("a", 4), blocks_of("a", 6, salt=1), blocks_of("b", 3)
    for names in (mine, old, recent):
        write(tier, names)
    tier.use(keys(old[:2]))
    tier.close()
    tier = open_tier(folders, 16, 0.25)
    assert on_disk(folders) == {tenant_tag("a"): 4, tenant_tag("b"): 3}
    assert is_whole(tier, mine) == [True] * 3
    assert is_whole(tier, old) == [True, True, False, False], "used last"
    assert is_whole(tier, recent) == [True, True, False, False, False, False], "its beginning"
    assert tier.stats()["used"] == 7 and not tier.counters.drops
    tier.close()
    tier = open_tier(folders, 16)  # gone is gone
    assert tier.stats()["used"] == 7
    write(tier, blocks_of("a", 9, salt=2))
    assert tier.stats()["used"] == 16, "the slots of what had to go can be used again"
    tier.close()


def test_blocks_that_are_read_stay_and_the_quota_holds(tmp_path: Path) -> None:
    tier = open_tier([tmp_path], 8, 0.25)
    read = blocks_of("a", 2)
    write(tier, read)
    pins = tier._store.catalog.pin(keys(read))
    for salt in range(1, 5):
        write(tier, blocks_of("a", 1, salt))
    assert on_disk([tmp_path]) == {tenant_tag("a"): 2}
    assert is_whole(tier, read) == [True, True]
    tier._store.catalog.unpin(pins)
    tier.close()


def test_blocks_of_nobody_count_as_one_tenant(tmp_path: Path) -> None:
    """Records that were written before there were tenants."""
    tier = open_tier([tmp_path], 10)
    tier.write(chain(6), filled(6, IMAGE_BYTES))
    write(tier, blocks_of("b", 4))
    tier.close()
    tier = open_tier([tmp_path], 10, 0.5)
    assert on_disk([tmp_path]) == {NO_TENANT: 5, tenant_tag("b"): 4}
    tier.close()


def test_a_record_that_cannot_be_cleared_costs_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier([tmp_path], 8)
    write(tier, blocks_of("a", 8))
    tier.close()
    disk = FaultyDisk(monkeypatch, tmp_path)
    disk.index_error = errno.EIO
    tier = open_tier([tmp_path], 8, 0.5)
    disk.index_error = 0
    assert tier.contains(keys(blocks_of("a", 8))) == [True] * 4 + [False] * 4
    write(tier, blocks_of("b", 4))
    for tenant in "ab":
        held = tier.contains(keys(blocks_of(tenant, 4)))
        assert held == [True, True, False, False], "half of the four slots that are left"
    tier.close()


def test_a_share_for_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenant_cache_share=0\.1 of .* 8 blocks, holds no"):
        open_tier([tmp_path / "new"], 8, 0.1)
    assert not (tmp_path / "new").exists()


def with_one_folder_left(policy: type) -> tuple[Catalog, list[BlockName], list[BlockName]]:
    """Four slots, all held by a tenant that may have half of them; what the other had is lost."""
    made = Catalog(2, policy(8, tenant_share=0.5))
    for volume in range(2):
        made.add_volume(volume, 4, NOTHING)
    mine, others = blocks_of("a", 4), blocks_of("b", 4)
    for pair in zip(mine, others, strict=True):  # one folder after the other, by turns
        for name, taken in zip(pair, made.take(pair), strict=True):
            assert taken is not None
            made.keep(name, taken.place)
    assert {made.slot(made.places[name.key])[0] for name in mine} == {0}
    made.remove_volume(1)
    return made, mine, others


@pytest.mark.parametrize("policy", [LRUPolicy, LearnedPolicy])
def test_a_folder_that_fails_makes_the_shares_smaller(policy: type) -> None:
    made, mine, others = with_one_folder_left(policy)
    new = blocks_of("a", 1, salt=1)
    made.use(keys(new))
    [taken] = made.take(new)
    assert taken is not None and taken.was_held
    made.keep(new[0], taken.place)
    assert set(made.places) == {mine[0].key, new[0].key}, "half of what is left"
    assert made._policy.capacity == 4
    made.use(keys(others))
    rest = made.take(others[:2])
    assert all(each is not None and each.was_held for each in rest), "their records are still set"
    places = [*made.places.values(), *(each.place for each in rest if isinstance(each, Taken))]
    assert sorted(made.slot(place) for place in places) == [(0, slot) for slot in range(4)]


@pytest.mark.parametrize("policy", [LRUPolicy, LearnedPolicy])
def test_the_other_folder_may_fail_too(policy: type) -> None:
    made, _, others = with_one_folder_left(policy)
    new = blocks_of("a", 1, salt=1)
    made.use(keys(new))
    [taken] = made.take(new)
    assert taken is not None
    assert made.remove_volume(0) == 1, "three had to leave, and one is being written"
    made.give_back(new[0], taken.place, usable=True)
    assert made._policy.capacity == 0 and made.take(others) == [None] * 4


class Life(RuleBasedStateMachine):
    """Three tenants write and use; now and then the tier is closed, or left, and opened again."""

    SLOTS = 10

    @initialize(share=st.sampled_from([0.2, 0.5, 1.0]))
    def start(self, share: float) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.folders = [self.folder / "one", self.folder / "two"]
        self.names = {
            name.key: name
            for tenant in "abc"
            for salt in (0, 1)
            for name in blocks_of(tenant, 5, salt)
        }
        self.open(share)

    def open(self, share: float) -> None:
        self.tier = open_tier(self.folders, self.SLOTS, share)
        self.most = int(share * self.SLOTS)

    @property
    def places(self) -> dict[bytes, int]:
        return self.tier._store.catalog.places

    @rule(tenant=st.sampled_from("abc"), salt=st.integers(0, 1), length=st.integers(1, 5))
    def write(self, tenant: str, salt: int, length: int) -> None:
        for name in blocks_of(tenant, length, salt):
            before = set(self.places)
            held = sum(self.names[key].tenant == name.tenant for key in before)
            write(self.tier, [name])
            lost = {self.names[key].tenant for key in before - set(self.places)}
            assert held < self.most or lost <= {name.tenant}, "another had to make room for it"

    @rule(tenant=st.sampled_from("abc"), salt=st.integers(0, 1), length=st.integers(1, 5))
    def use(self, tenant: str, salt: int, length: int) -> None:
        names = blocks_of(tenant, length, salt)
        self.tier.use(keys(names))
        assert is_whole(self.tier, names) == [name.key in self.places for name in names]

    @rule(share=st.sampled_from([0.2, 0.3, 0.5, 1.0]))
    def restart(self, share: float) -> None:
        before = Counter(self.names[key].tenant for key in self.places)
        self.tier.close()
        self.open(share)
        after = Counter(self.names[key].tenant for key in self.places)
        assert after == {each: min(count, self.most) for each, count in before.items()}

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "tier"):
            found = on_disk(self.folders)
            assert all(count <= self.most for count in found.values())
            assert found == Counter(self.names[key].tenant for key in self.places)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
