"""Bytes that are HTTP, almost HTTP, or nothing of the kind."""

from __future__ import annotations

import random

BODY = b'{"prompt": "hi", "max_tokens": 2}'
GOOD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def message(dice: random.Random) -> bytes:
    """One of the kinds below, sometimes with a few of its bytes changed."""
    kind = dice.choice([_line, _headers, _length, _chunks, _pipeline, _noise])
    content = kind(dice)
    if dice.random() < 0.15:
        spoilt = bytearray(content)
        for _ in range(dice.randint(1, 5)):
            spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        content = bytes(spoilt)
    return content


def _noise(dice: random.Random) -> bytes:
    return dice.choice(
        [
            dice.randbytes(dice.choice([1, 100, 20_000])),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(200),  # TLS
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\r\n" * 5000,
            b"EHLO example\r\n",
        ]
    )


def _line(dice: random.Random) -> bytes:
    line = dice.choice(
        [
            b"GET", b"GET /", b"GET / HTTP/9.9", b"GET / HTTP/1.1 more", b" GET / HTTP/1.1",
            b"GET /\x00 HTTP/1.1", b"GET http://127.0.0.1/health HTTP/1.1", b"OPTIONS * HTTP/1.1",
            b"CONNECT evil.example:443 HTTP/1.1", b"GET /" + b"a" * 100_000 + b" HTTP/1.1",
            b"G" * 50_000 + b" / HTTP/1.1", b"GET /health HTTP/1.0", b"GET /%zz HTTP/1.1",
            b"GET /health?" + b"a=b&" * 20_000 + b" HTTP/1.1", b"GET \xff\xfe HTTP/1.1",
        ]
    )  # fmt: skip
    return line + b"\r\nHost: 127.0.0.1\r\n\r\n"


def _headers(dice: random.Random) -> bytes:
    odd = dice.choice(
        [
            b"No colon here", b": no name", b"Na me: x", b"X-Bytes: \xff\x00\x01", b" folded: x",
            b"Host: evil.example", b"Host: ", b"Host: a\r\nHost: b", b"X-Long: " + b"v" * 200_000,
            b"\r\n".join(b"X-%d: y" % i for i in range(3000)), b"Upgrade: websocket",
            b"Connection: upgrade, close, keep-alive", b"Expect: 100-continue",
            b"Authorization: Bearer " + b"k" * 5000, b"Content-Type: " + b"a/b;" * 2000,
            b"Cookie: " + b"a=b; " * 1000, b"X-Request-Id: a\tb", b"Accept-Encoding: *;q=-1",
        ]
    )  # fmt: skip
    return GOOD + odd + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


def _length(dice: random.Random) -> bytes:
    length = dice.choice(
        [
            b"0", b"-1", b"1e3", b"0x21", b"+33", b"33, 33", b"33, 34", b" ", b"9" * 30, b"1",
            b"34", b"33\r\nContent-Length: 34", b"33\r\nTransfer-Encoding: chunked", b"2000000",
            b"2000001", b"99999999999",
        ]
    )  # fmt: skip
    return GOOD + b"Content-Length: " + length + b"\r\n\r\n" + BODY


def _chunks(dice: random.Random) -> bytes:
    encoding = dice.choice([b"chunked"] * 4 + [b"gzip, chunked", b"identity", b"chunked, chunked"])
    whole = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    body = dice.choice(
        [
            whole + b"0\r\n\r\n",
            whole,
            b"zz\r\n" + BODY,
            b"-1\r\n" + BODY,
            b"f" * 40 + b"\r\n" + BODY,
            b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
            whole.replace(b"\r\n", b";" + b"x=y;" * 3000 + b"\r\n", 1) + b"0\r\n\r\n",
            whole + b"0\r\n" + b"\r\n".join(b"T-%d: z" % i for i in range(2000)) + b"\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
            b"1\r\n \r\n" * 5000 + b"0\r\n\r\n",
        ]
    )
    return GOOD + b"Transfer-Encoding: " + encoding + b"\r\n\r\n" + body


def _pipeline(dice: random.Random) -> bytes:
    good = GOOD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    parts = [good, health, good[:-5], b"\r\n", b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"]
    return b"".join(dice.choices(parts, k=dice.randint(2, 6)))
