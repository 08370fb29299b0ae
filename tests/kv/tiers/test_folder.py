"""A cache folder: private, held by one engine at a time, and a good neighbour to other files."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from block_images import BLOCK_SIZE, chain, empty, filled, keys

from quire.errors import ConfigError
from quire.kv.tiers.ssd import files, stamps
from quire.kv.tiers.ssd.geometry import INDEX_FILE, OWN_FILES, Geometry
from quire.kv.tiers.ssd.store import parse_folders
from quire.kv.tiers.ssd.tier import SsdTier

IMAGE_BYTES = 6_000
GEOMETRY = Geometry(IMAGE_BYTES, BLOCK_SIZE)


def open_tier(*folders: Path, slots: int = 8) -> SsdTier:
    quota = len(folders) * GEOMETRY.quota_for(slots)
    return SsdTier(folders, quota, IMAGE_BYTES, BLOCK_SIZE)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_look_in(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kv"
    umask = os.umask(0)
    try:
        open_tier(folder).close()
    finally:
        os.umask(umask)
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(OWN_FILES, 0o600)


def test_files_that_others_could_read_are_closed_to_them(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / INDEX_FILE).chmod(0o644)
    open_tier(tmp_path).close()
    assert mode(tmp_path / INDEX_FILE) == 0o600


def test_a_second_engine_is_told_so_in_one_sentence(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(2), filled(2, IMAGE_BYTES))
    with pytest.raises(ConfigError, match=r"is in use by a running engine; stop that one .*\.$"):
        open_tier(tmp_path)
    assert all(tier.read(chain(2), empty(2, IMAGE_BYTES)))  # the first one is not disturbed
    tier.close()
    open_tier(tmp_path).close()


def test_another_process_is_told_so_too(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from quire.errors import ConfigError
from quire.kv.tiers.ssd.tier import SsdTier
try:
    SsdTier([Path({str(tmp_path)!r})], 10**6, {IMAGE_BYTES}, {BLOCK_SIZE})
except ConfigError as error:
    print(error)
"""
    tier = open_tier(tmp_path)
    command = [sys.executable, "-c", script]
    path = os.pathsep.join(sys.path)
    told = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": path})
    assert b"is in use by a running engine" in told.stdout, told.stderr
    tier.close()


def test_a_folder_that_is_not_opened_is_let_go(tmp_path: Path) -> None:
    """The first of two folders must not stay locked when the second one is refused."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be used \(.+\); give a folder that"):
        open_tier(tmp_path / "one", tmp_path / "file")
    open_tier(tmp_path / "one").close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / INDEX_FILE).symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(folder)
    assert precious.read_text() == "keep me"


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    others = ["notes.txt", "quire-kv.data.tmp", "quire-kv.index.1234", ".quire-kv.lock.swp"]
    for name in others:
        (tmp_path / name).write_text("not ours")
    tier = open_tier(tmp_path)
    tier.write(chain(4), filled(4, IMAGE_BYTES))
    tier.close()
    SsdTier([tmp_path], 10**6, 9_000, BLOCK_SIZE).close()  # replaces what is ours
    for name in others:
        assert (tmp_path / name).read_text() == "not ours"


@pytest.mark.parametrize("change", [{"block_size": 32}, {"image_bytes": 5_999}])
def test_blocks_of_another_shape_are_not_found(tmp_path: Path, change: dict[str, int]) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(4), filled(4, IMAGE_BYTES))
    tier.close()
    shape = {"image_bytes": IMAGE_BYTES, "block_size": BLOCK_SIZE} | change
    other = SsdTier([tmp_path], 10**6, **shape)
    assert other.contains(keys(chain(4))) == [False] * 4
    other.close()


def test_a_new_layout_version_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(4), filled(4, IMAGE_BYTES))
    tier.close()
    page = bytearray((tmp_path / INDEX_FILE).read_bytes())
    page[:4096] = Geometry(IMAGE_BYTES, BLOCK_SIZE, layout_version=2).first_page()
    (tmp_path / INDEX_FILE).write_bytes(page)
    tier = open_tier(tmp_path)
    assert tier.stats()["used"] == 0
    tier.close()


def test_a_disk_that_refuses_direct_io_is_read_and_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def refusing(fd: int, *rest: object) -> int:
        if files.fcntl.fcntl(fd, files.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return preadv(fd, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", refusing)
    tier = open_tier(tmp_path)
    assert tier.stats()["direct"] is False
    assert all(tier.write(chain(4), filled(4, IMAGE_BYTES)))
    assert all(tier.read(chain(4), empty(4, IMAGE_BYTES)))
    tier.close()


def test_the_order_of_use_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "FLUSH_SECONDS", 0.0)
    tier = open_tier(tmp_path, slots=6)
    for salt in range(3):
        tier.write(chain(2, salt), filled(2, IMAGE_BYTES))
    tier.use(keys(chain(2, 0)))
    tier.read(chain(1, 2), empty(1, IMAGE_BYTES))  # with it goes what was noted
    for volume in tier._store.volumes.values():
        volume.close()  # as the end of a process does
    tier = open_tier(tmp_path, slots=6)
    tier.write(chain(3, 9), filled(3, IMAGE_BYTES))
    assert tier.contains(keys(chain(2, 1))) == [False, False]  # used least
    assert tier.contains(keys(chain(2, 2))) == [True, False]  # its end before its beginning
    assert tier.contains(keys(chain(2, 0))) == [True, True]
    tier.close()


def test_blocks_go_to_each_folder_in_turn(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    tier = open_tier(*folders, slots=10)
    tier.write(chain(30), filled(30, IMAGE_BYTES))
    assert tier.stats()["slots"] == tier.stats()["used"] == 30
    tier.close()
    for folder in folders:
        alone = open_tier(folder, slots=10)
        assert alone.stats()["used"] == 10
        alone.close()
    tier = open_tier(*reversed(folders), slots=10)  # their order does not matter
    assert all(tier.read(chain(30), empty(30, IMAGE_BYTES)))
    tier.close()


def test_folders_that_were_used_apart_hold_each_block_once(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        tier = open_tier(folder, slots=4)
        tier.write(chain(3), filled(3, IMAGE_BYTES))
        tier.close()
    for used in (3, 8):
        tier = open_tier(*folders, slots=4)
        assert tier.stats()["used"] == used
        assert all(tier.read(chain(3), empty(3, IMAGE_BYTES)))
        tier.write(chain(5, salt=1), filled(5, IMAGE_BYTES))  # the rest of the room is free
        assert tier.stats()["used"] == 8
        tier.close()


def test_folders_come_with_commas() -> None:
    assert parse_folders("/a, /b") == [Path("/a"), Path("/b")]
    assert parse_folders("~/kv") == [Path.home() / "kv"]
    for wrong in ("", "/a,", "/a,/a", "/a,,/b"):
        with pytest.raises(ConfigError, match="give each folder once"):
            parse_folders(wrong)
