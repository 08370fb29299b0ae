"""From a file:// or s3:// URL to a client of the archive that it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from quire.config import parse_size
from quire.errors import ConfigError
from quire.kv.image import LAYOUT_VERSION
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.archive.client import ArchiveClient
from quire.kv.tiers.remote.archive.folder import Folder
from quire.kv.tiers.remote.archive.objects import Objects

OPTIONS = ["timeout", "quota", "refresh"]
REFRESH_S = {"file": 10.0, "s3": 60.0}  # between listings; a bucket's cost money


def archive_client(address: Address, timeout: float) -> ArchiveClient:
    objects = open_objects(address)
    refresh = address.seconds("refresh") or REFRESH_S[address.scheme]
    return ArchiveClient(objects, timeout, refresh, _quota(address))


def open_objects(address: Address) -> Objects:
    """What packs are kept in; it need not be there yet."""
    address.check_options(OPTIONS)
    if address.parts.netloc not in ("", "localhost") or address.parts.path.strip("/") == "":
        raise ConfigError(
            "A file:// cache URL names a folder of this machine; write file:///path/of/the/folder."
        )
    return Folder(Path(unquote(address.parts.path)), LAYOUT_VERSION)


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
