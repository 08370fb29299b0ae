"""The arguments of the commands that ask a running server, and the question itself."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from quire.api.cli.parser import CommandParser
from quire.errors import QuireError

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 150.0
NEEDS_KEYS = (
    "The server has to be started with --api-keys-file: what is a tenant's, its key says.\n"
)


def add_server_arguments(parser: CommandParser) -> None:
    parser.add_argument("--url", default=URL, help=f"the server (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help="default: $QUIRE_API_KEY, if it is set")
    parser.add_argument("--json", action="store_true", help="print one JSON object, on one line")


def add_prefix_arguments(parser: CommandParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="the prefix as text")
    parser.add_argument(
        "--tokens", metavar="ID", type=int, nargs="+", help="or the prefix as token ids"
    )
    parser.add_argument(
        "--cache-salt", metavar="SALT", default="", help="of the requests that it is for"
    )


def prefix_of(args: argparse.Namespace) -> dict[str, Any]:
    if (args.prompt is None) == (args.tokens is None):
        raise QuireError("Give the prefix by --prompt or by --tokens.")
    prefix = {"prompt": args.prompt} if args.tokens is None else {"tokens": args.tokens}
    return {**prefix, "cache_salt": args.cache_salt}


def show_blocks(args: argparse.Namespace, path: str, body: dict[str, Any] | None = None) -> int:
    """Ask the server, and print how many blocks of each tier it says."""
    blocks = _ask(args, path, body)
    if args.json:
        print(json.dumps(blocks))
        return 0
    for tier, count in blocks.items():
        print(f"{tier:<8} {'–' if count is None else f'{count:,} blocks'}")
    return 0


def _ask(args: argparse.Namespace, path: str, body: dict[str, Any] | None) -> dict[str, int | None]:
    key = args.api_key or os.environ.get("QUIRE_API_KEY")
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    url = f"{args.url.rstrip('/')}{path}"
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise QuireError(_message(error)) from None
    except (OSError, ValueError, HTTPException) as error:
        raise QuireError(
            f"{args.url} does not answer ({error}); give the server's --url."
        ) from None
    blocks = answer.get("blocks") if isinstance(answer, dict) else None
    if not isinstance(blocks, dict):
        raise QuireError(f"{args.url} is no server of Quire; give the server's --url.")
    return blocks


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, HTTPException, KeyError, TypeError):
        return f"The server answered {error.code}; is it Quire's?"
