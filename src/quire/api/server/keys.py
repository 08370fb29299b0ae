"""API keys, and the tenants behind them.

A tenant's blocks lie under a salt that is derived here, on the server, from its key (or from the
name of its group, if it shares a cache with others). A request's own salt only narrows it further.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.api.server.errors import ApiError
from quire.errors import ConfigError

VARIABLE = "QUIRE_API_KEYS"
CALLER = "quire.caller"  # in the scope of a request that the server itself makes for a tenant
OPERATOR = "operator"  # the group whose keys may look at all tenants' requests


@dataclass(frozen=True)
class Tenant:
    salt: str  # what keeps its blocks apart, in every tier
    name: str  # for logs; says nothing of the key
    in_background: bool = False  # what it asks for runs behind all other requests, …
    turn: int = 0  # … and in this order among its like

    @property
    def view(self) -> str:
        """The prefix of all namespaces that it may look at: its salt, or none for an operator."""
        return "" if self.name == OPERATOR else self.salt

    @property
    def sees_all(self) -> bool:
        return self.view == ""

    def namespace(self, cache_salt: str) -> str:
        """Both salts as one. All tenants' are equally long, so no two pairs give the same."""
        return self.salt + cache_salt


ANYONE = Tenant("", "")


class Keys:
    def __init__(self, entries: Iterable[tuple[str, str | None]] = ()) -> None:
        self._tenants = [(_digest(key), _tenant(key, group)) for key, group in entries]

    @classmethod
    def read(cls, file: str | None) -> Keys:
        """Read keys from the file and the environment; without any key, every client is let in."""
        lines = re.split(r"[,\n]", os.environ.get(VARIABLE, ""))
        if file is not None:
            try:
                lines += Path(file).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The API keys in {file} cannot be read: {error}.") from None
        keys = cls(_entries(lines))
        if file is not None and not keys:
            raise ConfigError(f"{file} has no API key in it; write one on each line.")
        return keys

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenants(self) -> list[Tenant]:
        """Those that there are; without keys, all clients are one."""
        return list(dict.fromkeys(tenant for _, tenant in self._tenants)) or [ANYONE]

    def tenant(self, authorization: str | None, api_key: str | None = None) -> Tenant:
        """The tenant that has this key; ApiError if the key is unknown.

        `api_key` is the header `x-api-key`, in which Anthropic's clients send one.
        """
        if not self._tenants:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = api_key or ""
        if not key:
            raise _unauthorized(
                "Give an API key in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        digest = _digest(key.strip())
        found = None
        for known, tenant in self._tenants:  # all of them: the time must not reveal a key
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthorized("The API key is not known here; check it.")
        return found


def _entries(lines: Iterable[str]) -> list[tuple[str, str | None]]:
    entries = []
    for line in lines:
        words = line.split("#")[0].split()
        if len(words) > 2:
            raise ConfigError("An API key's line has the key, and at most one group behind it.")
        if words:
            entries.append((words[0], words[1] if len(words) == 2 else None))
    return entries


def _tenant(key: str, group: str | None) -> Tenant:
    source = f"key:{key}" if group is None else f"group:{group}"
    salt = hashlib.sha256(f"quire tenant {source}".encode()).hexdigest()
    return Tenant(salt, group if group is not None else f"key-{salt[:8]}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
