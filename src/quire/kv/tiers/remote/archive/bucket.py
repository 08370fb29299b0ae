"""Packs as objects of an S3 bucket; `pip install 'quire[s3]'`.

A store of this kind keeps no times of use: packs count as used when they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.objects import Bytes, Listed, Objects
from quire.kv.tiers.remote.archive.pack import Span

OPTIONS = ["endpoint", "region"]
_CHUNK = 128 << 10  # bytes of a reply that are taken at once
_REQUEST_S = 5.0  # beyond the caller's own patience, after which a request is given up


class Bucket(Objects):
    """What the URL does not say (keys, region) comes from the environment, as AWS's tools do it."""

    def __init__(self, address: Address, version: int, timeout: float) -> None:
        parts, endpoint = address.parts, address.options.get("endpoint")
        if not parts.hostname:
            raise ConfigError("An s3:// cache URL names a bucket; write s3://bucket/prefix.")
        config: dict[str, Any] = {"virtual_hosted_style_request": endpoint is None}
        if endpoint is not None:
            config["endpoint"] = endpoint
        if endpoint is not None or "region" in address.options:
            config["region"] = address.options.get("region", "us-east-1")
        if parts.username and parts.password:
            config["access_key_id"] = unquote(parts.username)
            config["secret_access_key"] = unquote(parts.password)
        bucket = parts.netloc.rpartition("@")[2]
        prefix = "/".join(filter(None, [*unquote(parts.path).split("/"), f"quire-{version}"]))
        self._store = S3Store(
            bucket,
            prefix=prefix,
            client_options={
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": f"{int(1000 * timeout)}ms",
                "timeout": f"{int(1000 * (timeout + _REQUEST_S))}ms",
            },
            retry_config={"max_retries": 0},  # the breaker and the next request are the retries
            **config,
        )

    def check(self) -> None:
        with _as_os_error():
            next(iter(obstore.list(self._store)), None)

    def names(self) -> Iterator[str]:
        return (each.name for each in self.listed())

    def listed(self) -> Iterator[Listed]:
        with _as_os_error():
            for page in obstore.list(self._store):
                for each in page:
                    if "/" in each["path"]:
                        yield Listed(each["path"], each["last_modified"].timestamp())

    def read(self, name: str, spans: Sequence[Span]) -> Iterator[Bytes]:
        """From the object's beginning on: a pack is part of a prefix, and is asked for as one."""
        with _as_os_error():
            reply = iter(obstore.get(self._store, name).stream(min_chunk_size=_CHUNK))
            ahead, at = bytearray(), 0  # what has come of the object from byte `at` on
            for start, size in spans:
                while at + len(ahead) < start + size and (data := next(reply, None)) is not None:
                    ahead += data
                yield ahead[start - at : start - at + size]
                del ahead[: start - at + size]
                at = start + size

    def write(self, name: str, data: Bytes, wanted: Callable[[], bool] = lambda: True) -> None:
        if wanted():
            with _as_os_error():
                obstore.put(self._store, name, data, use_multipart=False)

    def delete(self, name: str) -> None:
        with _as_os_error():
            obstore.delete(self._store, name)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except BaseError as error:
        raise OSError(str(error).split("\n\nDebug source", 1)[0]) from None
