"""One HTTP connection: uvicorn's, with bounds on what a client may send and how long it may take.

    connection ─► head ─► body ─► answer ─► next head …
        ╰─ request_seconds ─╯ │      │  ╰─ keep_alive_seconds
           max_header_bytes   │      ╰─ unread_seconds, while the client does not read
                              ╰─ request_seconds, and one more for each 1,000 bytes that have come

What is refused here never reaches the application: a head that is too large or no HTTP gets an
error in OpenAI's shape, a client that is late a 408, and the connection ends.

Where an answer is sent before the whole body has come, as a 413 is, the rest is read and thrown
away: many clients send all they have before they read anything, and to close a socket that has
unread input resets the connection, which takes the answer with it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from quire.api.server.errors import ApiError
from quire.api.server.http.pipelining import PipelinedConnection
from quire.api.server.settings import ServerConfig

LEAST_RATE = 1000  # bytes a second of a body that may take longer than `request_seconds`

NO_HTTP = ApiError(400, "What came is no HTTP/1.1 request; check the address and the client.")
TOO_LONG_HEAD = "The request's {} more than {:,} bytes; send less."
TOO_LATE = ApiError(
    408,
    "The request did not come in time; send it whole, and without pauses.",
    code="request_timeout",
)
TOO_MANY = ApiError(
    503,
    "The server has as many connections as it takes; try again, or use fewer at once.",
    code="too_many_connections",
    headers={"Retry-After": "1"},
)


class HttpConnection(PipelinedConnection):
    def __init__(self, settings: ServerConfig, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        self._sending = _Timer(self.loop)  # until the client has to have sent its request
        self._reading = _Timer(self.loop)  # until it has to have read what it was sent
        self._since = 0.0  # when the server began to wait for the client
        self._is_receiving = False  # a request has begun, and is not whole
        self._is_leaving = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._pending_bytes = 0  # what came since the parser last had something to tell

    # --- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Transport(transport, self)))
        if len(self.connections) > self._settings.max_connections:
            self._refuse(TOO_MANY)
            return
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_leaving = True
        self._sending.stop()
        self._reading.stop()
        super().connection_lost(exc)

    def leave(self, transport: asyncio.Transport) -> None:
        """Close the connection; first let a client that is still sending read the answer."""
        if self._is_leaving:
            return
        self._is_leaving = True
        self.abandon()
        self._sending.stop()
        if self._is_receiving and transport.can_write_eof():
            transport.write_eof()
            self.flow.resume_reading()  # until the client has closed its side, too
            self._reading.start(self._settings.request_seconds, transport.abort)
        else:
            transport.close()
            self._reading.start(self._settings.unread_seconds, transport.abort)

    def shutdown(self) -> None:
        if self._is_receiving and not self._is_answering:
            self.transport.abort()  # the server does not wait for half a request
        else:
            super().shutdown()

    @property
    def is_leaving(self) -> bool:
        return self._is_leaving

    # --- what comes ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_leaving:
            return  # thrown away: the client sends all of it before it reads the answer
        self._unset_keepalive_if_required()
        if self._is_idle and not self._sending.is_running:
            self._await_client()
        self._pending_bytes += len(data)
        try:
            self._parse(data)
            self._check_head("headers have")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            found = error.__context__
            self._is_receiving = True  # even if it is no HTTP: more may follow
            self._refuse(found if isinstance(found, ApiError) else NO_HTTP)
        except ApiError as error:
            self._refuse(error)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        else:
            return
        self._ignore_upgrade(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_receiving = True
        self._head_bytes = self._body_bytes = self._pending_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url), "first line has")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for trailers behind the body, too."""
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + len(": \r\n"), "headers have")

    def on_headers_complete(self) -> None:
        self._prefer_target_to_host()
        super().on_headers_complete()
        self._pending_bytes = 0
        self._since = self.loop.time()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        if not self.cycle.response_complete:  # else it is thrown away, and extends no deadline
            self._body_bytes += len(body)
        super().on_body(body)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on with the body of a request that asks for another protocol, as Java's client does.

        The parser would take the body for the other protocol. So a second parser reads the body,
        by the headers that say where it ends.
        """
        names = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % each for each in self.headers if each[0] in names]
        self.parser = httptools.HttpRequestParser(_BodyReader(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(lines), rest))

    def end_body(self) -> None:
        """The body of such a request is whole; another request may follow."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body is still to come
        self._is_receiving = False
        self._pending_bytes = 0
        self._sending.stop()
        super().on_message_complete()
        if self._is_idle and not self._is_leaving:  # it was answered before it was whole
            self._keep_alive()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_receiving and not self._is_leaving:
            self._body_bytes = 0
            self._await_client()

    def _keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    @property
    def _is_idle(self) -> bool:
        return not self._is_receiving and (self.cycle is None or self.cycle.response_complete)

    def _prefer_target_to_host(self) -> None:
        """A target with a host, as proxies are sent, is the one that counts (RFC 9112, 3.2.2)."""
        if b"://" not in self.url.partition(b"?")[0]:
            return
        authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
        self.headers[:] = [each for each in self.headers if each[0] != b"host"]
        self.headers.append((b"host", authority.rpartition(b"@")[2]))

    # --- bounds -------------------------------------------------------------------------------

    def _count_head(self, count: int, what: str) -> None:
        self._head_bytes += count
        self._pending_bytes = 0
        self._check_head(what)

    def _check_head(self, what: str) -> None:
        """Bytes that the parser has not reported yet, such as a header without end, count, too."""
        limit = self._settings.max_header_bytes
        if self._head_bytes + self._pending_bytes > limit:
            is_line = what.startswith("first")
            code = "uri_too_long" if is_line else "headers_too_large"
            raise ApiError(414 if is_line else 431, TOO_LONG_HEAD.format(what, limit), code=code)

    def _await_client(self) -> None:
        """Set the time by which the client has to have sent a whole request."""
        self._since = self.loop.time()
        self._sending.start(self._settings.request_seconds, self._check_time)

    def _check_time(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused or self._is_answering:
            self._since = now  # the client cannot send, or need not yet
        left = self._since + self._settings.request_seconds + self._body_bytes / LEAST_RATE - now
        if left > 0:
            self._sending.start(left, self._check_time)
        elif not self._is_receiving:
            self.transport.close()
        elif self._is_answered:
            self.transport.abort()
        else:
            self._refuse(TOO_LATE)

    @property
    def _is_answered(self) -> bool:
        """Whether the request that is still coming has its answer already."""
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and cycle.scope is self.scope

    @property
    def _is_answering(self) -> bool:
        """Whether a request that has come whole is being answered."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._is_leaving:
            self._reading.start(self._settings.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._is_leaving:
            self._reading.stop()

    # --- what goes back -----------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(NO_HTTP)

    def _refuse(self, error: ApiError) -> None:
        """Answer in the application's place, if it has not begun to, and close."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if not self.pipeline and not (is_open and cycle.response_started):
            self.transport.write(self._message(error))
        self.abandon()  # to the application, the client has left
        self.transport.close()

    def _message(self, error: ApiError) -> bytes:
        response = error.response()
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", uuid.uuid4().hex.encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return STATUS_LINE[error.status] + b"".join(lines) + b"\r\n" + bytes(response.body)


class _Transport:
    """A transport whose `close` is the connection's `leave`."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._transport = transport
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.is_leaving or self._transport.is_closing()

    def close(self) -> None:
        self._connection.leave(self._transport)


class _BodyReader:
    """The callbacks of a parser that reads only a body."""

    def __init__(self, connection: HttpConnection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.end_body


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Start, or start again if it runs."""
        self.stop()
        self._handle = self._loop.call_later(seconds, act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
