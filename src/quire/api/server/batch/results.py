"""Results of a batch, appended to a file, from which a run that was killed goes on.

The id of a result names the line that it answers and a digest of that line. So the results are
their own journal: a line is answered once it is in the file with its line end, and there is no
second file to fall out of step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.api.server.batch.lines import InputLine, LineError
from quire.errors import QuireError

RESULT = re.compile(rb'\{"id": "batch_req_([0-9a-f]{16})_([0-9]{1,8})", ')
DIGEST = 8  # bytes


class AnsweredLines:
    """Which lines have a result: eight bytes for each line of the file."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, number: int, digest: str) -> None:
        end = number * DIGEST
        if len(self._digests) < end:
            self._digests.extend(bytes(end - len(self._digests)))
        self._digests[end - DIGEST : end] = bytes.fromhex(digest)

    def has(self, line: InputLine) -> bool:
        """QuireError if what was answered is another line."""
        end = line.number * DIGEST
        found = self._digests[end - DIGEST : end]
        if not any(found):
            return False
        if found.hex() != line.digest:
            raise QuireError(
                f"Line {line.number} of the input is not the one that was answered before; "
                "write the results into a new file."
            )
        return True


class ResultsFile:
    """Opened, it has whole results only: what a kill left of the last one is cut."""

    def __init__(self, path: Path, answered: AnsweredLines) -> None:
        """The lines that it has results of are added to `answered`."""
        self._answered = answered
        self.num_results = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(self._fd, "rb", closefd=False) as file:
            self._size = self._take_stock(file)
        os.ftruncate(self._fd, self._size)

    def _take_stock(self, lines: Iterable[bytes]) -> int:
        """The bytes that whole results take."""
        size = 0
        for line in lines:
            found = RESULT.match(line)
            if found is None or not line.endswith(b"}\n"):
                break
            self._answered.add(int(found[2]), found[1].decode())
            self.num_results += 1
            size += len(line)
        return size

    def append(self, line: InputLine, result: bytes) -> None:
        """Write one result, or none of it: OSError if the disk is full."""
        try:
            written = 0
            while written < len(result):
                written += os.pwrite(self._fd, result[written:], self._size + written)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(result)
        self._answered.add(line.number, line.digest)
        self.num_results += 1

    def close(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)


def answer_result(line: InputLine, status: int, body: Any) -> bytes:
    """The result of a line that a route has answered."""
    response = {"status_code": status, "request_id": line.result_id, "body": body}
    return _result(line, response, None)


def error_result(line: InputLine, error: LineError) -> bytes:
    """The result of a line that reached no route."""
    return _result(line, None, {"code": error.code, "message": error.message})


def _result(line: InputLine, response: Any, error: Any) -> bytes:
    # The id comes first: it is what `ResultsFile` looks for.
    result = {
        "id": line.result_id,
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(result).encode() + b"\n"
