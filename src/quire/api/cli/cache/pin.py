"""`quire cache pin`: keeps a prefix for a time in the tiers of a running server."""

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


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = (
        'example:\n  quire cache pin --prompt "$(cat system.txt)" --seconds 3600 --api-key sk-one\n'
        f"\n{NEEDS_KEYS}"
    )
    parser.add_argument("--seconds", type=float, required=True, help="for how long")
    add_prefix_arguments(parser)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return show_blocks(args, "/v1/cache/pin", {**prefix_of(args), "seconds": args.seconds})
