"""From a URL to a tier."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.breaker import Breaker, State
from quire.kv.tiers.remote.client import Client, ValueShape
from quire.kv.tiers.remote.guard import Guard
from quire.kv.tiers.remote.tier import RemoteTier, value_shape
from quire.kv.tiers.tier import Tier

DEFAULT_TIMEOUT_S = 1.0
_ARCHIVES = ["file", "s3"]
_REDIS = ["redis", "rediss", "unix", "valkey", "valkeys", "redis+cluster", "rediss+cluster"]


def open_remote(url: str, image_bytes: int | Sequence[int], block_size: int) -> Tier:
    """The tier behind `url`; it need not be there yet.

    A URL that makes no sense, or a package that is missing, is a ConfigError.
    """
    address = Address.parse(url)
    timeout = address.seconds("timeout") or DEFAULT_TIMEOUT_S
    if address.scheme == "quire":
        from quire.kv.tiers.shared.tier import open_shared

        return open_shared(address, image_bytes, block_size, timeout)
    shape = value_shape(image_bytes, block_size)
    client = _client(address, shape, timeout)
    guard = Guard(client, address.shown, address.hide, Breaker(state=State.OPEN))
    return RemoteTier(client, guard, shape, timeout, image_bytes)


def _client(address: Address, shape: ValueShape, timeout: float) -> Client:
    if address.scheme in _REDIS:
        return _redis_client(address, shape, timeout)
    if address.scheme == "mooncake":
        return _mooncake_client(address, shape, timeout)
    if address.scheme in _ARCHIVES:
        from quire.kv.tiers.remote.archive.open import archive_client

        return archive_client(address, shape, timeout)
    known = ["redis", "rediss", "unix", "redis+cluster", "mooncake", *_ARCHIVES, "quire"]
    raise ConfigError(
        f"A remote cache's URL cannot begin with {address.scheme!r}; use one of "
        f"{', '.join(f'{scheme}://' for scheme in known)}."
    )


def _redis_client(address: Address, shape: ValueShape, timeout: float) -> Client:
    try:
        from quire.kv.tiers.remote.redis.client import RedisClient
        from quire.kv.tiers.remote.redis.url import OPTIONS, connection_settings, is_cluster
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A {address.scheme}:// cache needs the package {error.name}; "
            "run pip install 'quire[redis]'."
        ) from None
    address.check_options(["timeout", "ttl", "cluster", *OPTIONS])
    settings = connection_settings(address)
    return RedisClient(settings, is_cluster(address), shape, timeout, address.seconds("ttl"))


def _mooncake_client(address: Address, shape: ValueShape, timeout: float) -> Client:
    from quire.kv.tiers.remote.mooncake.client import MooncakeClient
    from quire.kv.tiers.remote.mooncake.url import OPTIONS, check_installed, setup_of

    check_installed()
    address.check_options(["timeout", *OPTIONS])
    return MooncakeClient(setup_of(address), shape, timeout)
