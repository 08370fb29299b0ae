"""io_uring and threads do the same: all transfers, their results, within their depth."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from block_images import empty, filled

from quire.kv.tiers.ssd import io_engine as engine_module
from quire.kv.tiers.ssd.choose_engine import choose_engine
from quire.kv.tiers.ssd.io_engine import IoEngine, Transfer, pieces

SIZE = 1 << 16


@pytest.fixture
def engine(engine_name: str) -> Iterator[IoEngine]:
    made = choose_engine(engine_name)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def transfers(fd: int, buffers: list[memoryview], is_write: bool) -> list[Transfer]:
    return [Transfer(fd, at * SIZE, [part], is_write, at) for at, part in enumerate(buffers)]


def results(engine: IoEngine, wanted: list[Transfer]) -> dict[int, int]:
    found: dict[int, int] = {}
    engine.run(wanted, lambda transfer, result: found.update({transfer.block: result}))
    return found


def test_what_is_written_is_read(engine: IoEngine, file: int) -> None:
    many = 5 * engine.depth
    written, read = filled(many, SIZE), empty(many, SIZE)
    assert results(engine, transfers(file, written, True)) == dict.fromkeys(range(many), SIZE)
    assert results(engine, transfers(file, read, False)) == dict.fromkeys(range(many), SIZE)
    assert read == written


def test_buffers_of_one_transfer_follow_each_other_in_the_file(engine: IoEngine, file: int) -> None:
    written, read = filled(3, 3 * 4096), empty(1, 9 * 4096)
    assert results(engine, [Transfer(file, 0, written, True, 0)]) == {0: 9 * 4096}
    assert results(engine, [Transfer(file, 0, read, False, 0)]) == {0: 9 * 4096}
    assert bytes(read[0]) == b"".join(written)


def test_read_only_memory_can_be_written(engine: IoEngine, file: int) -> None:
    text = memoryview(b"read-only " * 100)
    assert results(engine, [Transfer(file, 7, [text], True, 0)]) == {0: 1000}
    assert os.pread(file, 2000, 7) == text


def test_a_short_read_says_how_much_it_was(engine: IoEngine, file: int) -> None:
    os.pwrite(file, b"x" * (SIZE + 10), 0)
    found = results(engine, transfers(file, empty(3, SIZE), False))
    assert found == {0: SIZE, 1: 10, 2: 0}


def test_errors_are_results(engine: IoEngine, file: int) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    closed = os.dup(file)
    os.close(closed)
    buffers = filled(3, 4096)
    wanted = [
        Transfer(full, 0, buffers[:1], True, 0),
        Transfer(closed, 0, buffers[1:2], False, 1),
        Transfer(file, 0, buffers[2:], True, 2),
    ]
    assert results(engine, wanted) == {0: -errno.ENOSPC, 1: -errno.EBADF, 2: 4096}
    os.close(full)


def test_transfers_are_drawn_as_they_are_needed(engine: IoEngine, file: int) -> None:
    drawn, ended = 0, 0

    def draw() -> Iterator[Transfer]:
        nonlocal drawn
        for transfer in transfers(file, filled(3 * engine.depth, SIZE), True):
            drawn += 1
            assert drawn - ended <= 2 * engine.depth + 1
            yield transfer

    def done(transfer: Transfer, result: int) -> None:
        nonlocal ended
        ended += 1

    engine.run(draw(), done)
    assert drawn == ended == 3 * engine.depth


def test_an_exception_waits_for_what_is_under_way(engine: IoEngine, file: int) -> None:
    def fail(transfer: Transfer, result: int) -> None:
        raise RuntimeError("stop")

    written = filled(2 * engine.depth, SIZE)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="stop"):
            engine.run(transfers(file, written, True), fail)
    # Had anything been left under way, its result would come now.
    assert results(engine, transfers(file, written[:2], True)) == {0: SIZE, 1: SIZE}


def test_threads_do_not_disturb_each_other(engine: IoEngine, tmp_path: Path) -> None:
    def session(number: int) -> bool:
        fd = os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT)
        written, read = filled(40, SIZE, seed=number), empty(40, SIZE)
        for _ in range(3):
            results(engine, transfers(fd, written, True))
            results(engine, transfers(fd, read, False))
        os.close(fd)
        return read == written

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(session, range(12)))


def test_rings_of_threads_that_ended_are_closed() -> None:
    """A server that makes threads all day must not run out of descriptors."""
    try:
        engine = choose_engine("io_uring")
    except OSError:
        pytest.skip("this kernel has no io_uring, or forbids it")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(engine.queue).result()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    engine.close()


def test_without_io_uring_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kv.tiers.ssd import uring

    def refused(*arguments: int) -> int:
        uring.ctypes.set_errno(errno.EPERM)  # what a container's filter says
        return -1

    monkeypatch.setattr(uring, "syscall", refused)
    chosen = choose_engine()
    assert chosen.name == "threads"
    chosen.close()
    with pytest.raises(PermissionError):
        choose_engine("io_uring")


@pytest.mark.parametrize("sizes", [[4096], [4096, 3 << 20], [4096, 8192], [4096, (1 << 20) - 4096]])
def test_pieces_cover_everything_once(sizes: list[int]) -> None:
    buffers = [filled(1, size, seed=at)[0] for at, size in enumerate(sizes)]
    cut = list(pieces(3, 4096, buffers, True, 7))
    assert b"".join(part for piece in cut for part in piece.buffers) == b"".join(buffers)
    offset = 4096
    for piece in cut:
        assert (piece.offset, piece.block, piece.fd) == (offset, 7, 3)
        assert piece.size <= engine_module.PIECE_BYTES and piece.size % 4096 == 0
        offset += piece.size
