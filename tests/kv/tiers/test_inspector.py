"""`stat` tells what is there, `verify` finds what is wrong with it, `clear` takes what is ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, filled, keys
from tier_harness import flip

from quire.errors import ConfigError
from quire.kv.image import BlockName
from quire.kv.tiers.ssd import verifier
from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE, OWN_FILES, Geometry
from quire.kv.tiers.ssd.inspector import clear, stat, verify
from quire.kv.tiers.ssd.tier import SsdTier
from quire.kv.tiers.tier import PAGE

IMAGE_BYTES = 9_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)
SLOT = GEOMETRY.slot_bytes


def open_tier(folder: Path) -> SsdTier:
    return SsdTier([folder], GEOMETRY.quota_for(20), IMAGE_BYTES, BLOCK_SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five blocks of one namespace, three of another."""
    tier = open_tier(tmp_path / "kv")
    tier.write(chain(5), filled(5, IMAGE_BYTES))
    tier.write(chain(3, salt=1), filled(3, IMAGE_BYTES))
    tier.close()
    return tmp_path / "kv"


def verdicts(folder: Path) -> Counter[str]:
    steps: list[int] = []

    def start(total: int) -> Callable[[], object]:
        return lambda: steps.append(total)

    found = verify(folder, start)
    assert len(steps) == (steps[0] if steps else 0)  # one for each block
    return found


def test_stat_tells_what_is_there(folder: Path) -> None:
    facts = stat(folder)
    assert (facts.image_bytes, facts.block_size, facts.slots) == (IMAGE_BYTES, BLOCK_SIZE, 20)
    assert (facts.blocks, facts.torn, facts.is_in_use) == (8, 0, False)
    assert GEOMETRY.slot_bytes * 20 < facts.bytes_on_disk <= GEOMETRY.quota_for(20)
    ours, others = chain(1)[0].root.hex(), chain(1, salt=1)[0].root.hex()
    assert {root: each.blocks for root, each in facts.namespaces.items()} == {ours: 5, others: 3}
    assert facts.last_use_ns == facts.namespaces[others].last_use_ns
    assert facts.namespaces[others].last_use_ns > facts.namespaces[ours].last_use_ns


def test_stat_works_beside_an_engine_and_changes_nothing(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    stat(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    tier = open_tier(folder)
    assert stat(folder).is_in_use
    tier.close()


def test_verify_finds_everything_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "MEMORY_BYTES", 3 * 12_288)  # in three parts
    assert verdicts(folder) == {"whole": 8, "torn": 0, "foreign": 0, "corrupt": 0, "io error": 0}


def test_verify_drops_what_is_not_whole(folder: Path) -> None:
    flip(folder / DATA_FILE, 1 * SLOT + PAGE + 5)  # an image
    flip(folder / DATA_FILE, 2 * SLOT + 30)  # a key
    flip(folder / DATA_FILE, 3 * SLOT + 3)  # a magic number
    flip(folder / DATA_FILE, 4 * SLOT + 130)  # a token
    flip(folder / INDEX_FILE, PAGE + 5 * 128 + 3)  # a record
    assert verdicts(folder) == {"whole": 3, "torn": 2, "foreign": 2, "corrupt": 1, "io error": 0}
    assert verdicts(folder) == {"whole": 3, "torn": 0, "foreign": 0, "corrupt": 0, "io error": 0}
    tier = open_tier(folder)
    assert tier.stats()["used"] == 3
    assert tier.contains(keys(chain(5))) == [True, False, False, False, False]
    tier.close()


def test_verify_does_not_believe_a_key_that_does_not_follow_from_the_tokens(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    liar = BlockName(b"k" * 32, bytes(32), bytes(32), chain(1)[0].tokens)
    tier.write([liar], filled(1, IMAGE_BYTES))
    tier.close()
    assert verdicts(tmp_path)["foreign"] == 1


def test_an_empty_cache_can_be_verified(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    assert verdicts(tmp_path).total() == 0
    assert stat(tmp_path).last_use_ns == 0


def test_clear_takes_our_files_only(folder: Path) -> None:
    (folder / "notes.txt").write_text("not ours")
    on_disk = stat(folder).bytes_on_disk
    assert abs(clear(folder) - on_disk) < 64 << 10
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    open_tier(folder).close()


def test_clear_takes_a_cache_that_is_beyond_repair(folder: Path) -> None:
    (folder / INDEX_FILE).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="is not a cache folder"):
        stat(folder)
    clear(folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("act", [verdicts, clear])
def test_a_folder_in_use_is_left_alone(folder: Path, act: Callable[[Path], object]) -> None:
    tier = open_tier(folder)
    with pytest.raises(ConfigError, match=r"is in use by a running engine; .*\.$"):
        act(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(OWN_FILES)
    tier.close()


@pytest.mark.parametrize("act", [stat, verdicts, clear])
def test_other_folders_are_refused_in_one_sentence(
    tmp_path: Path, act: Callable[[Path], object]
) -> None:
    with pytest.raises(ConfigError, match=r"^There is no folder .*; give .*\.$"):
        act(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r" is not a cache folder; give .*\.$"):
        act(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_second_engine_gets_in_after_a_clear(folder: Path) -> None:
    """The lock file that was removed must not be mistaken for the one that is there."""
    clear(folder)
    tier = open_tier(folder)
    with pytest.raises(ConfigError, match="in use"):
        open_tier(folder)
    tier.close()


def test_the_tools_do_without_torch() -> None:
    """Or a look into a folder would take seconds."""
    code = "import sys, quire.kv.tiers.ssd.inspector; print('torch' in sys.modules)"
    path = os.pathsep.join(sys.path)
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert told.stdout == b"False\n", told.stderr
