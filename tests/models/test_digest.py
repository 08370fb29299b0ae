"""The digest of a checkpoint: of all its bytes, the same for ever, and read once for all starts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.models.checkpoints import digest, digest_cache
from quire.models.checkpoints.digest import LEAF, Fingerprint

READ = 2 * LEAF  # in these tests; digests do not depend on it
SIZE = READ + 12_345
FROZEN = {
    "no files": "ec9ba111749a22d616d48d8fbf695e4852aaf7682f227c4f63d74630719eb1e2",
    "small": "141955bceefc82c403090bd848c396afa08894a1a7ecdf2b1bab70afa7d2025a",
    "small, large": "6109bf076972455361b24282a6c3c7d02d8098049e2e3f61ae53053309552931",
    "large": "d5de9aeb39940463b51be06c6a0423ca845a7f5aafe949a7da875d61dabc550c",
}


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, also of files that were written a moment ago."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digest, "OLD_ENOUGH_NS", -(10**18))
    monkeypatch.setattr(digest, "READ", READ)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(some_bytes(SIZE))
    return path


def result(*paths: Path, kind: str = "test") -> str:
    return Fingerprint(kind, paths).result()


def bytes_hashed(*paths: Path) -> int:
    """By a start of its own."""
    fingerprint = Fingerprint("test", paths)
    fingerprint.result()
    return fingerprint.bytes_hashed


# --- what it is ---------------------------------------------------------------------------------


def plain_digest(kind: str, *contents: bytes) -> str:
    """The scheme said plainly: all in one thread, all in memory."""
    whole = hashlib.sha256(b"quire.checkpoint" + len(kind).to_bytes(8, "little") + kind.encode())
    for content in contents:
        file = hashlib.sha256(b"quire.file" + len(content).to_bytes(8, "little"))
        for at in range(0, len(content), LEAF):
            file.update(hashlib.sha256(content[at : at + LEAF]).digest())
        whole.update(file.digest())
    return whole.hexdigest()


def test_frozen_vectors(tmp_path: Path) -> None:
    """A cache that outlives a version of Quire is of use to the next one only if these stay."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b'{"hidden_size": 64}')
    large.write_bytes(bytes(i % 251 for i in range(3 * LEAF + 7)))
    assert result(kind="dummy") == FROZEN["no files"]
    assert result(small, kind="safetensors") == FROZEN["small"]
    assert result(small, large, kind="safetensors") == FROZEN["small, large"]
    assert result(large, kind="gguf") == FROZEN["large"]


@pytest.mark.parametrize(
    "size", [0, 1, LEAF - 1, LEAF, LEAF + 1, READ - 1, READ, READ + 1, 2 * READ + LEAF + 5]
)
def test_it_is_the_plain_one_whatever_the_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(some_bytes(size))
    assert result(path) == plain_digest("test", some_bytes(size))
    assert result(path) == plain_digest("test", some_bytes(size))  # as it was kept


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    path = tmp_path / "weights"
    path.write_bytes(some_bytes(3 * READ))
    assert result(path) == plain_digest("test", some_bytes(3 * READ))


UNCHANGED = plain_digest("test", some_bytes(SIZE))


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(at=st.integers(0, SIZE - 1), flip=st.integers(1, 255))
def test_any_byte_that_changes_changes_it(file: Path, at: int, flip: int) -> None:
    content = bytearray(some_bytes(SIZE))
    content[at] ^= flip
    file.write_bytes(content)
    assert result(file) != UNCHANGED


def test_order_number_kind_and_borders_of_files_count(tmp_path: Path) -> None:
    a, b, both, empty = (tmp_path / name for name in ("a", "b", "both", "empty"))
    a.write_bytes(some_bytes(LEAF))
    b.write_bytes(b"more")
    both.write_bytes(a.read_bytes() + b.read_bytes())
    empty.touch()
    lists = [(), (a,), (a, b), (b, a), (a, a), (both,), (empty,), (a, empty), (empty, a)]
    assert len({result(*paths) for paths in lists}) == len(lists)
    assert result(a, kind="one") != result(a, kind="another")


def test_neither_the_name_nor_the_place_of_a_file_counts(file: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy, link = tmp_path / "elsewhere" / "other name", tmp_path / "link"
    copy.write_bytes(file.read_bytes())
    link.symlink_to(file)
    assert result(file) == result(copy) == result(link)


# --- files that change or fail ------------------------------------------------------------------


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace_it(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [append, replace_it, rewrite, lambda path: os.truncate(path, 5)])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_file_that_changes_while_it_is_loaded_is_refused(
    file: Path, cache: Path, change: Callable[[Path], None], is_kept: bool
) -> None:
    if is_kept:
        result(file)
    fingerprint = Fingerprint("test", [file])
    fingerprint.begin()
    change(file)
    with pytest.raises(ModelError, match=r"weights changed while it was loaded: start again"):
        fingerprint.result()
    assert len(list(cache.glob("*"))) == is_kept
    assert result(file) == plain_digest("test", file.read_bytes())


def test_a_chmod_is_no_change(file: Path, cache: Path) -> None:
    fingerprint = Fingerprint("test", [file])
    fingerprint.begin()
    file.chmod(0o600)
    assert fingerprint.result() == plain_digest("test", some_bytes(SIZE))


def test_a_file_that_is_gone(file: Path) -> None:
    fingerprint = Fingerprint("test", [file])
    file.unlink()
    with pytest.raises(ModelError, match=r"weights cannot be read: No such file or directory\."):
        fingerprint.result()
    with pytest.raises(ModelError, match=r"weights cannot be read"):
        Fingerprint("test", [file])


def test_nothing_is_read_before_it_is_asked_for_or_after_it_is_cancelled(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "hash_leaves", lambda *_: pytest.fail("it was read"))
    fingerprint = Fingerprint("test", [file])
    assert not fingerprint.is_known
    fingerprint.cancel()


# --- what is kept -------------------------------------------------------------------------------


def test_a_second_start_reads_no_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_hashed(file) == SIZE
    first = result(file)
    monkeypatch.setattr(digest, "hash_leaves", lambda *_: pytest.fail("it was read again"))
    again = Fingerprint("test", [file])
    again.begin()
    assert again.is_known
    assert again.result() == first and again.bytes_hashed == 0


def test_another_process_finds_it(file: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from quire.models.checkpoints.digest import Fingerprint;"
        "made = Fingerprint('test', [Path(sys.argv[1])]); print(made.result(), made.bytes_hashed)"
    )
    command = [sys.executable, "-c", script, str(file)]
    first = result(file)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [first, "0"]


@pytest.mark.parametrize(
    "change",
    [Path.touch, rewrite, replace_it, append, lambda path: path.chmod(0o600)],
    ids=["touched", "rewritten", "replaced", "longer", "chmod"],
)
def test_whatever_happened_to_the_file_it_is_read_again(
    file: Path, change: Callable[[Path], None]
) -> None:
    result(file)
    change(file)
    assert bytes_hashed(file) == file.stat().st_size
    assert bytes_hashed(file) == 0


def test_a_writer_that_puts_the_times_back_is_noticed(file: Path) -> None:
    """As `cp -p` and `rsync -t` do; no caller can set `ctime`."""
    before, times = result(file), file.stat()
    content = bytearray(file.read_bytes())
    content[LEAF] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert result(file) != before


def test_what_was_just_written_is_not_kept(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change may come within the same tick of the file system's clock."""
    monkeypatch.setattr(digest, "OLD_ENOUGH_NS", 10**18)
    assert bytes_hashed(file) == bytes_hashed(file) == SIZE
    assert not cache.exists()


def test_small_files_are_not_kept(tmp_path: Path, cache: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert bytes_hashed(config) == bytes_hashed(config) == 2
    assert not cache.exists()


def only_entry(cache: Path) -> Path:
    [entry] = cache.iterdir()
    return entry


def damaged(content: bytes) -> dict[str, bytes]:
    line, _, _ = content.partition(b"\n")
    entry: dict[str, Any] = json.loads(line)

    def checked(**changes: Any) -> bytes:
        changed = json.dumps(entry | changes).encode()
        return changed + b"\n" + hashlib.sha256(changed).hexdigest().encode()

    return {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "noise": some_bytes(300),
        "not JSON": b"{" * 5000 + b"\n" + hashlib.sha256(b"{" * 5000).hexdigest().encode(),
        "no object": b"[]\n" + hashlib.sha256(b"[]").hexdigest().encode(),
        "another digest": content.replace(entry["digest"].encode(), b"0" * 64),
        "no check": line,
        "huge": bytes(1 << 24),
        "short digest": checked(digest=""),
        "odd digest": checked(digest="xyz"),
        "digest of another type": checked(digest=7),
        "another format": checked(format="quire file digest 0"),
        "another path": checked(path="/other"),
    }


def test_a_damaged_entry_is_as_good_as_none(file: Path, cache: Path) -> None:
    expected = result(file)
    entry = only_entry(cache)
    whole = entry.read_bytes()
    for name, content in damaged(whole).items():
        entry.write_bytes(content)
        assert result(file) == expected, name
        assert entry.read_bytes() == whole, name


def test_any_bit_of_an_entry_may_flip(file: Path, cache: Path) -> None:
    expected = result(file)
    entry = only_entry(cache)
    whole = entry.read_bytes()
    for at in range(0, len(whole), 2):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        known = digest_cache.find_digest(digest_cache.FileState.of(file))
        assert known is None, at
    entry.write_bytes(whole)
    assert result(file) == expected


def unwritable(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where a folder should be")


def entry_is_a_folder(cache: Path) -> None:
    path = cache.parent.parent / "weights"
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    (cache / name / "inside").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [unwritable, entry_is_a_folder])
def test_where_nothing_can_be_kept_it_is_hashed_each_time(
    file: Path, cache: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(cache)
    assert result(file) == result(file) == plain_digest("test", some_bytes(SIZE))
    if cache.is_dir():
        assert len(list(cache.iterdir())) == 1  # and nothing is left aside


def test_without_a_home(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("QUIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert result(file) == plain_digest("test", some_bytes(SIZE))


def test_old_entries_give_way(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MOST_ENTRIES", 3)
    files = [tmp_path / str(i) for i in range(5)]
    for path in files:
        path.write_bytes(some_bytes(LEAF + 1))
        result(path)
        for entry in cache.iterdir():  # each older than the next, whatever the clock's ticks
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**9))
    assert len(list(cache.iterdir())) == 3
    assert [bytes_hashed(path) > 0 for path in files[2:]] == [False] * 3


def test_only_the_user_reads_an_entry(file: Path, cache: Path) -> None:
    result(file)
    assert stat.S_IMODE(only_entry(cache).stat().st_mode) == 0o600


def test_several_processes_at_once(file: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from quire.models.checkpoints import digest;"
        "digest.OLD_ENOUGH_NS = -10**18;"
        "print({digest.Fingerprint('test', [Path(sys.argv[1])]).result() for _ in range(20)})"
    )
    command = [sys.executable, "-c", script, str(file)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=300)[0].strip() for process in running}
    assert said == {str({plain_digest("test", some_bytes(SIZE))})}
    assert len(list(cache.iterdir())) == 1
