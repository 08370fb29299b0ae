"""What a mooncake:// URL says, in the words of Mooncake's client."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import Any

from quire.config import parse_size
from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address

OPTIONS = ["metadata", "protocol", "device", "segment", "hostname"]
_PORT = 50051
_BUFFER_BYTES = 16 << 20  # of its own, for calls that are not made here; it wants some


def check_installed() -> None:
    if find_spec("mooncake") is None:
        raise ConfigError(
            "A mooncake:// cache needs Mooncake's client; run pip install 'quire[mooncake]'."
        )
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise ConfigError(
            "Mooncake's client needs the system's libibverbs.so.1; install it, on Debian with "
            "apt-get install libibverbs1."
        ) from None


def setup_of(address: Address) -> dict[str, Any]:
    """The settings for Mooncake's client; what is left out, it or the host fills in."""
    options, parts = address.options, address.parts
    if not parts.hostname or parts.path.strip("/"):
        raise ConfigError("A mooncake:// cache URL names a master; write mooncake://host:port.")
    setup = {
        "master_server_addr": f"{parts.hostname}:{parts.port or _PORT}",
        "metadata_server": options.get("metadata", "P2PHANDSHAKE"),
        "protocol": options.get("protocol", "tcp"),
        "rdma_devices": options.get("device", ""),
        "global_segment_size": _segment(options.get("segment", "0")),
        "local_buffer_size": _BUFFER_BYTES,
    }
    return setup | ({"local_hostname": options["hostname"]} if "hostname" in options else {})


def _segment(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(
            f"The remote cache's segment={text} is no size; give bytes, such as segment=8GiB."
        ) from None
