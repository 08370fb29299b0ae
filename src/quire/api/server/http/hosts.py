"""Which hosts the server answers for.

A web page may point a name of its own at 127.0.0.1 (DNS rebinding): to the browser, page and server
are then one origin, and the page reads all that the server shows. Its requests have that name in
`Host`. So the server answers only for names that no stranger can point at it: those of loopback,
the address that it is bound to, and what `allowed_host` lists. An address cannot be pointed at
another; so where the server is bound to all addresses of the machine, any is taken for one of them,
since a router or a container's host may have put its own in front.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.server.errors import ApiError, bad_request
from quire.api.server.settings import ServerConfig

ANY = "*"
LOCAL = "localhost"
WITH_PORT = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::\d*)?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostCheck:
    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        self._app = app
        bound = _address(settings.host)
        self._is_everywhere = settings.host == "" or (bound is not None and bound.is_unspecified)
        self._names = {LOCAL, _name(settings.host), *map(_name, settings.allowed_host)}
        if self._is_everywhere:
            self._names.add(_name(socket.gethostname()))
        self._domains = (f".{LOCAL}", *(n for n in self._names if n.startswith(".")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response(scope)(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not any(hosts) and scope.get("http_version") == "1.0":
            return None  # health checks send no Host; browsers always do
        if len(hosts) != 1 or not hosts[0]:
            return bad_request("Give the server's host in one header `Host`.")
        name = _name(hosts[0])
        if self._is_answered(name, scope):
            return None
        return ApiError(
            421,
            f"The server does not answer for the host {name[:200]!r}; if it is the server's, start "
            "it with --allowed-host and that name.",
            code="host_not_allowed",
        )

    def _is_answered(self, name: str, scope: Scope) -> bool:
        if ANY in self._names or name in self._names or name.endswith(self._domains):
            return True
        address = _address(name)
        if address is None:
            return False
        here, _ = scope.get("server") or ("", None)
        return address.is_loopback or self._is_everywhere or address == _address(here)


def _name(host: str) -> str:
    """Without its port, brackets and last dot; `*.example.com` is `.example.com`."""
    host = host.strip().lower()
    if found := WITH_PORT.fullmatch(host):
        host = found[1] or found[2]
    return host.removesuffix(".").removeprefix("*" if host.startswith("*.") else "")


def _address(name: str) -> Address | None:
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
