"""`quire cache delete`: deletes a prefix, or all that the key's tenant has, from every tier."""

from __future__ import annotations

import argparse

from quire.api.cli.cache.server_call import (
    add_prefix_arguments,
    add_server_arguments,
    prefix_of,
    show_blocks,
)
from quire.api.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = (
        'examples:\n  quire cache delete --prompt "$(cat secret.txt)" --api-key sk-one\n'
        "  quire cache delete --everything --api-key sk-one\n"
    )
    parser.add_argument("--everything", action="store_true", help="all that the key's tenant has")
    add_prefix_arguments(parser)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    body = {"everything": True} if args.everything else prefix_of(args)
    return show_blocks(args, "/v1/cache/delete", body)
