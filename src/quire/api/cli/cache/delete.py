"""`quire cache delete`: deletes a prefix, or all that the key's tenant has, from every tier."""

from __future__ import annotations

import argparse

from quire.api.cli.cache.server_call import (
    NEEDS_KEYS,
    add_prefix_arguments,
    add_server_arguments,
    prefix_of,
    show_blocks,
)
from quire.api.cli.parser import CommandParser
from quire.errors import QuireError


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = (
        'examples:\n  quire cache delete --prompt "$(cat secret.txt)" --api-key sk-one\n'
        f"  quire cache delete --everything --api-key sk-one\n\n{NEEDS_KEYS}"
    )
    parser.add_argument("--everything", action="store_true", help="all that the key's tenant has")
    add_prefix_arguments(parser)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.everything and not (args.prompt is None and args.tokens is None):
        raise QuireError("Give either --everything or a prefix by --prompt or --tokens, not both.")
    if args.everything and args.cache_salt:
        raise QuireError(
            "--everything is of all salts; leave out --cache-salt, or give a prefix instead."
        )
    body = {"everything": True} if args.everything else prefix_of(args)
    return show_blocks(args, "/v1/cache/delete", body)
