"""From a file:// or s3:// URL to a client of the archive that it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from quire.config import parse_size
from quire.errors import ConfigError
from quire.kv.image import LAYOUT_VERSION
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.client import ArchiveClient
from quire.kv.tiers.remote.archive.codec import Codec
from quire.kv.tiers.remote.archive.folder import Folder
from quire.kv.tiers.remote.archive.objects import Objects
from quire.kv.tiers.remote.client import ValueShape

OPTIONS = ["timeout", "quota", "refresh", "compress"]
REFRESH_S = {"file": 10.0, "s3": 60.0}  # between listings; a bucket's cost money


def archive_client(address: Address, shape: ValueShape, timeout: float) -> ArchiveClient:
    objects = open_objects(address, timeout)
    refresh = address.seconds("refresh") or REFRESH_S[address.scheme]
    return ArchiveClient(objects, timeout, refresh, _quota(address), _codec(address, shape))


def open_objects(address: Address, timeout: float) -> Objects:
    """What packs are kept in; it need not be there yet."""
    return _bucket(address, timeout) if address.scheme == "s3" else _folder(address)


def _folder(address: Address) -> Objects:
    address.check_options(OPTIONS)
    if address.parts.netloc not in ("", "localhost") or address.parts.path.strip("/") == "":
        raise ConfigError(
            "A file:// cache URL names a folder of this machine; write file:///path/of/the/folder."
        )
    return Folder(Path(unquote(address.parts.path)), LAYOUT_VERSION)


def _bucket(address: Address, timeout: float) -> Objects:
    try:
        from quire.kv.tiers.remote.archive.bucket import OPTIONS as BUCKET_OPTIONS
        from quire.kv.tiers.remote.archive.bucket import Bucket
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"An s3:// cache needs the package {error.name}; run pip install 'quire[s3]'."
        ) from None
    address.check_options([*OPTIONS, *BUCKET_OPTIONS])
    return Bucket(address, LAYOUT_VERSION, timeout)


def _codec(address: Address, shape: ValueShape) -> Codec:
    """Compressed values are read whatever the URL says, where the package is there."""
    wanted = address.options.get("compress", "none")
    if wanted not in ("none", "zstd"):
        raise ConfigError(f"The remote cache's compress={wanted} may be zstd or none.")
    try:
        from quire.kv.tiers.remote.archive.compressed import Compressed
    except ModuleNotFoundError as error:
        if wanted == "none":
            return Codec()
        raise ConfigError(
            f"compress=zstd needs the package {error.name}; run pip install 'quire[zstd]'."
        ) from None
    return Compressed(shape.head_bytes, compresses=wanted == "zstd")


def _quota(address: Address) -> int | None:
    text = address.options.get("quota")
    if text is None:
        return None
    try:
        quota = parse_size(text)
    except ValueError:
        quota = 0
    if quota <= 0:
        raise ConfigError(
            f"The remote cache's quota={text} is no size; give bytes, such as quota=500GiB."
        )
    return quota
