"""What a URL says about a Redis server, in the words of redis-py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from redis.connection import parse_url

from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address

_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}  # as Valkey's own clients call them
_FILES = ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"]
_TLS = [*_FILES, "ssl_cert_reqs", "ssl_check_hostname"]
OPTIONS = ["db", "client_name", *_TLS]


def is_cluster(address: Address) -> bool:
    return address.scheme.endswith("+cluster") or address.options.get("cluster") == "1"


def connection_settings(address: Address) -> dict[str, Any]:
    """The arguments of redis-py's connection, and which kind of it."""
    scheme = address.scheme.removesuffix("+cluster")
    scheme = _SCHEMES.get(scheme, scheme)
    options = {name: text for name, text in address.options.items() if name in OPTIONS}
    _check(address, scheme, options)
    place = address.parts.netloc + address.parts.path
    return dict(parse_url(f"{scheme}://{place}?{urlencode(options)}"))


def _check(address: Address, scheme: str, options: dict[str, str]) -> None:
    path = address.parts.path
    if scheme == "unix" and (not path or is_cluster(address)):
        raise ConfigError("A unix:// cache URL names one socket; write unix:///path/of/the/socket.")
    database = options.get("db", path.strip("/") if scheme != "unix" else "") or "0"
    if not database.isdecimal():
        raise ConfigError(f"The remote cache's database {database!r} is no number; use /0.")
    for name, text in options.items():
        if name in _TLS and scheme != "rediss":
            raise ConfigError(f"The remote cache's {name} needs TLS; begin the URL with rediss://.")
        if name in _FILES and not Path(text).exists():
            raise ConfigError(f"The remote cache's {name}={text} does not exist; give its path.")
    if options.get("ssl_cert_reqs", "required") not in ("none", "optional", "required"):
        raise ConfigError("The remote cache's ssl_cert_reqs may be required, optional or none.")
