"""Lines as they are read, and results as they are found again after a kill at any byte."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from batch_files import BAD_LINES, request

from quire.api.server.batch.lines import InputLine, count_lines, parse_line, read_lines
from quire.api.server.batch.results import AnsweredLines, ResultsFile, answer_result
from quire.errors import QuireError

LINES = [parse_line(i + 1, request(f"{i}", "a").encode()) for i in range(5)]


def opened(path: Path) -> tuple[ResultsFile, AnsweredLines]:
    answered = AnsweredLines()
    return ResultsFile(path, answered), answered


def write(path: Path, lines: list[InputLine]) -> None:
    results, _ = opened(path)
    for line in lines:
        results.append(line, answer_result(line, 200, {"text": "é\n" * 3}))
    results.close()


def test_lines_are_numbered_as_they_stand_in_the_file(tmp_path: Path):
    path = tmp_path / "in"
    path.write_text(f"{request('a', 'x')}\n\n  \n{request('b', 'y')}\r\n{request('c', 'z')}")
    lines = list(read_lines(path, 1000))
    assert [(line.number, line.custom_id) for line in lines] == [(1, "a"), (4, "b"), (5, "c")]
    assert lines[1].url == "/v1/completions" and lines[1].body["prompt"] == "y"
    assert count_lines(path) == 3


@pytest.mark.parametrize("text", BAD_LINES[:4] + BAD_LINES[5:7] + ["[" * 100_000, '"\\ud800"'])
def test_a_bad_line_has_an_error_and_a_result(text: str):
    line = parse_line(7, text.encode())
    assert line.error is not None
    assert line.error.message.endswith(".") and len(line.error.message) < 600


def test_what_is_not_answered_in_its_place_is_refused():
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}
    assert parse_line(1, json.dumps(line).encode()).error is None
    for field in ("stream", "background"):
        given = {**line, "body": {"input": "Hi", field: True}}
        error = parse_line(1, json.dumps(given).encode()).error
        assert error is not None and f"leave {field} out" in error.message


def test_a_line_that_is_too_long_is_not_kept(tmp_path: Path):
    path = tmp_path / "in"
    path.write_text(f"{request('a', 'x' * 5_000_000)}\n{request('b', 'y')}\n" + "z" * 3_000_000)
    first, second, third = read_lines(path, 2000)
    assert first.error is not None and first.error.code == "line_too_long"
    assert second.custom_id == "b" and second.error is None
    assert third.error is not None and third.error.code == "line_too_long"
    assert count_lines(path) == 3
    assert [first, second, third] == list(read_lines(path, 2000))


def test_a_result_is_found_again(tmp_path: Path):
    write(tmp_path / "out", LINES[:3])
    results, answered = opened(tmp_path / "out")
    assert [answered.has(line) for line in LINES] == [True] * 3 + [False] * 2
    assert results.num_results == 3
    results.close()


def test_a_kill_at_any_byte_leaves_whole_results_only(tmp_path: Path):
    path = tmp_path / "out"
    write(path, LINES[:2])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    ends = {0, len(whole)} | {place + i for place in (first, len(whole)) for i in (-2, -1)}
    for cut in sorted({*ends, first, first + 1, *range(0, len(whole), 11)}):
        path.write_bytes(whole[:cut])
        results, answered = opened(path)
        kept = [answered.has(line) for line in LINES[:2]]
        assert kept == [cut >= first, cut == len(whole)]
        assert path.stat().st_size == first * kept[0] + (len(whole) - first) * kept[1]
        for line, is_kept in zip(LINES[:2], kept, strict=True):
            if not is_kept:
                results.append(line, answer_result(line, 200, {"text": "é\n" * 3}))
        results.close()
        assert path.read_bytes() == whole


def test_what_is_no_result_is_cut_with_all_behind_it(tmp_path: Path):
    """As a machine that lost its power may leave it."""
    path = tmp_path / "out"
    write(path, LINES[:3])
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bytes(len(second)) + third)
    results, answered = opened(path)
    assert [answered.has(line) for line in LINES[:3]] == [True, False, False]
    results.close()
    assert path.read_bytes() == first


def test_another_input_is_refused(tmp_path: Path):
    write(tmp_path / "out", LINES[:3])
    _, answered = opened(tmp_path / "out")
    with pytest.raises(QuireError, match="Line 2 of the input is not the one"):
        answered.has(parse_line(2, request("1", "other").encode()))


def test_a_full_disk_leaves_no_half_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out"
    results, answered = opened(path)
    results.append(LINES[0], answer_result(LINES[0], 200, {}))
    size, pwrite = path.stat().st_size, os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at == size:
            return pwrite(fd, data[:20], at)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="full"):
            results.append(LINES[1], answer_result(LINES[1], 200, {}))
    assert path.stat().st_size == size and not answered.has(LINES[1])
    results.append(LINES[1], answer_result(LINES[1], 200, {}))
    results.close()
    assert [json.loads(each)["custom_id"] for each in path.read_text().splitlines()] == ["0", "1"]
