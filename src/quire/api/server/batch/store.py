"""Files and batches on disk, a folder for each tenant.

    batch_dir/<tenant>/file-….data    what was uploaded, or the results of a batch
                       file-….json    its record; without one, the file is not there yet
                       batch_….json   a batch's record

Names in the folder are made here: what a client calls its file stands in the record alone. A tenant
has an object of its own, which knows no others, so another tenant's id is as unknown as any.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import BinaryIO

from quire.api.server.batch.records import (
    BatchRecord,
    FileRecord,
    new_file_id,
    save,
)
from quire.api.server.errors import ApiError, bad_request
from quire.api.server.keys import Tenant
from quire.api.server.settings import ServerConfig
from quire.errors import ConfigError

log = logging.getLogger("quire.server")

CHUNK = 1 << 20
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_FILENAME = 255


class TenantFiles:
    """What one tenant has; all of it is called from the event loop, but for `write`."""

    def __init__(self, folder: Path, settings: ServerConfig) -> None:
        self.folder = folder
        self._settings = settings
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self._coming: dict[str, int] = {}  # bytes of the uploads that are being written
        if folder.is_dir():
            self._load()

    def _load(self) -> None:
        for path in self.folder.glob("*.json"):
            try:
                values = json.loads(path.read_text())
                if FILE_ID.fullmatch(path.stem):
                    self.files[path.stem] = FileRecord(**values)
                elif BATCH_ID.fullmatch(path.stem):
                    self.batches[path.stem] = BatchRecord(**values)
            except (ValueError, TypeError):
                log.warning("%s cannot be read, and is left alone.", path)
        kept = {*self.files}
        for batch in self.batches.values():
            kept |= {batch.output_file, batch.error_file}
        for path in self.folder.iterdir():
            is_left_over = path.suffix == ".data" and path.stem not in kept
            if is_left_over or path.suffix == ".new":
                path.unlink()  # a kill came before its record was written

    # --- files --------------------------------------------------------------------------------

    def data(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.data"

    def file(self, file_id: str) -> FileRecord:
        if (record := self.files.get(file_id)) is None:
            raise ApiError(404, f"There is no file {file_id[:100]!r}.", code="file_not_found")
        return record

    def check_room(self, num_bytes: int) -> None:
        """Raise where a file of this size would be too much."""
        settings = self._settings
        if num_bytes > settings.max_file_bytes:
            says = f"A file has at most {settings.max_file_bytes:,} bytes; split it."
            raise ApiError(413, says, code="too_large", param="file")
        if len(self.files) + len(self._coming) >= settings.max_files:
            says = f"There are {len(self.files):,} files already; delete some."
            raise ApiError(403, says, code="too_many_files")
        stored = sum(each.bytes for each in self.files.values()) + sum(self._coming.values())
        if stored + num_bytes > settings.max_stored_bytes:
            most = f"{settings.max_stored_bytes:,} bytes"
            says = f"All files together have at most {most}; delete some."
            raise ApiError(403, says, code="storage_full")

    def begin_upload(self, num_bytes: int) -> str:
        """The id of a file that is to be written; `end_upload` in any case."""
        self.check_room(num_bytes)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_id = new_file_id()
        self._coming[file_id] = num_bytes
        return file_id

    def write(self, file_id: str, source: BinaryIO) -> int:
        """Copy what was uploaded; in a thread, since a disk may be slow."""
        size = 0
        with self.data(file_id).open("wb") as target:
            while piece := source.read(CHUNK):
                size += target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        return size

    def end_upload(self, file_id: str) -> None:
        """Nothing is kept of a file that was not added."""
        del self._coming[file_id]
        if file_id not in self.files:
            self.data(file_id).unlink(missing_ok=True)

    def add_file(self, record: FileRecord) -> None:
        """A file whose data are there."""
        save(record, self.folder)
        self.files[record.id] = record

    def delete_file(self, file_id: str) -> None:
        self.file(file_id)
        for batch in self.batches.values():
            if batch.input_file == file_id and not batch.has_ended:
                says = f"The file is being read by {batch.id}; cancel that first."
                raise ApiError(409, says, code="file_in_use")
        (self.folder / f"{file_id}.json").unlink()
        self.data(file_id).unlink()
        del self.files[file_id]

    # --- batches ------------------------------------------------------------------------------

    def batch(self, batch_id: str) -> BatchRecord:
        if (record := self.batches.get(batch_id)) is None:
            raise ApiError(404, f"There is no batch {batch_id[:100]!r}.", code="batch_not_found")
        return record

    def open_batches(self) -> list[BatchRecord]:
        return [each for each in self.batches.values() if not each.has_ended]

    def add_batch(self, record: BatchRecord) -> None:
        """As many batches are kept as files: the oldest that has ended makes room for a new one."""
        if len(self.batches) >= self._settings.max_files:
            ended = [each for each in self.batches.values() if each.has_ended]
            if not ended:
                says = f"{len(self.batches):,} batches are open already; wait for one to end."
                raise ApiError(403, says, code="too_many_batches")
            oldest = min(ended, key=lambda each: each.created)
            del self.batches[oldest.id]
            (self.folder / f"{oldest.id}.json").unlink()
        self.save_batch(record)
        self.batches[record.id] = record

    def save_batch(self, record: BatchRecord) -> None:
        save(record, self.folder)


class FileStore:
    """The folder of all tenants, which one server uses at a time."""

    def __init__(self, settings: ServerConfig) -> None:
        assert settings.batch_dir is not None
        self._settings = settings
        self._folder = Path(settings.batch_dir).expanduser()
        self._tenants: dict[str, TenantFiles] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (self._folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another server uses batch_dir {self._folder}; give each its own."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"batch_dir {self._folder} cannot be used: {error.strerror}."
            ) from None

    def of(self, tenant: Tenant) -> TenantFiles:
        name = hashlib.sha256(f"quire files {tenant.salt}".encode()).hexdigest()[:32]
        if name not in self._tenants:
            self._tenants[name] = TenantFiles(self._folder / name, self._settings)
        return self._tenants[name]

    def close(self) -> None:
        """Another server may use the folder from now on."""
        self._lock.close()


def shown_name(given: str | None) -> str:
    """What a client calls its file, to be shown to it again and used for nothing else."""
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    name = "".join(each for each in name if each.isprintable())
    if not name:
        raise bad_request("file: it needs a name.", param="file")
    return name[:MAX_FILENAME]
