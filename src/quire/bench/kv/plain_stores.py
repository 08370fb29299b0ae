"""The same bytes, moved to and from a remote store by the plainest means that there are for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from quire.kv.tiers.remote.address import Address

PACK_BYTES = 8 << 20  # files are as large as an archive's packs
MEMORY = "/dev/shm"  # where copies come from and go to, if there is such a place


class PlainStore(ABC):
    @abstractmethod
    def write(self, number: int) -> None:
        """All values, under names that no other number has."""

    @abstractmethod
    def read(self, number: int) -> None: ...

    @abstractmethod
    def clear(self, number: int) -> None: ...

    def close(self) -> None:
        return None


def plain_store(address: Address, values: Sequence[bytes], batch: int) -> PlainStore | None:
    """Moves `batch` values at once where that is a choice; None where there is nothing plain."""
    if address.scheme == "mooncake" or address.scheme.endswith("+cluster"):
        return None
    if address.scheme == "file":
        return PlainFiles(Path(unquote(address.parts.path)), values)
    if address.scheme == "s3":
        return PlainRclone(address, values) if shutil.which("rclone") else None
    return PlainRedis(address, values, batch)


class PlainRedis(PlainStore):
    """redis-py, in pipelines."""

    def __init__(self, address: Address, values: Sequence[bytes], batch: int) -> None:
        import redis

        from quire.kv.tiers.remote.redis.url import connection_settings

        settings = connection_settings(address)
        pool = redis.ConnectionPool(**settings, protocol=2)
        self._client: Any = redis.Redis(connection_pool=pool)
        self._values, self._batch = values, batch

    def write(self, number: int) -> None:
        self._pipelined("set", number)

    def read(self, number: int) -> None:
        self._pipelined("get", number)

    def clear(self, number: int) -> None:
        self._client.unlink(*self._keys(number))

    def _pipelined(self, command: str, number: int) -> None:
        keys = self._keys(number)
        for start in range(0, len(keys), self._batch):
            pipeline = self._client.pipeline(transaction=False)
            for i, key in enumerate(keys[start : start + self._batch], start):
                words = (key, self._values[i]) if command == "set" else (key,)
                getattr(pipeline, command)(*words)
            assert all(pipeline.execute())

    def _keys(self, number: int) -> list[str]:
        return [f"quire-bench:{number}:{i}" for i in range(len(self._values))]


class PlainFiles(PlainStore):
    """`cp`, between files in memory and the mount."""

    def __init__(self, mount: Path, values: Sequence[bytes]) -> None:
        self._mount = mount
        self._near = Path(
            tempfile.mkdtemp(prefix="quire-bench-", dir=MEMORY if Path(MEMORY).is_dir() else None)
        )
        self._source, self._target = self._near / "source", self._near / "target"
        self._source.mkdir()
        data = b"".join(values)
        for at in range(0, len(data), PACK_BYTES):
            (self._source / f"{at:012}").write_bytes(data[at : at + PACK_BYTES])

    def write(self, number: int) -> None:
        _run("cp", "-r", str(self._source), str(self._far(number)))

    def read(self, number: int) -> None:
        shutil.rmtree(self._target, ignore_errors=True)
        _run("cp", "-r", str(self._far(number)), str(self._target))

    def clear(self, number: int) -> None:
        shutil.rmtree(self._far(number), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._near, ignore_errors=True)

    def _far(self, number: int) -> Path:
        return self._mount / f"bench-{number}"


class PlainRclone(PlainFiles):
    """`rclone copy`, between files in memory and the bucket; its start is a part of the time."""

    def __init__(self, address: Address, values: Sequence[bytes]) -> None:
        super().__init__(Path(), values)
        parts = address.parts
        settings = {
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ENDPOINT": address.options.get("endpoint", ""),
            "RCLONE_S3_REGION": address.options.get("region", "us-east-1"),
            "RCLONE_S3_ACCESS_KEY_ID": unquote(parts.username or ""),
            "RCLONE_S3_SECRET_ACCESS_KEY": unquote(parts.password or ""),
            "RCLONE_CONFIG": "",
        }
        self._environment = {name: text for name, text in settings.items() if text}
        bucket = parts.netloc.rpartition("@")[2]
        self._place = f":s3:{bucket}/{parts.path.strip('/')}"

    def write(self, number: int) -> None:
        self._copy(str(self._source), self._remote(number))

    def read(self, number: int) -> None:
        shutil.rmtree(self._target, ignore_errors=True)
        self._copy(self._remote(number), str(self._target))

    def clear(self, number: int) -> None:
        _run("rclone", "purge", self._remote(number), environment=self._environment)

    def _remote(self, number: int) -> str:
        return f"{self._place}/bench-{number}"

    def _copy(self, source: str, target: str) -> None:
        options = ["--transfers", "8", "--ignore-checksum"]
        _run("rclone", "copy", source, target, *options, environment=self._environment)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        command, check=True, env=os.environ | (environment or {}), stderr=subprocess.DEVNULL
    )
