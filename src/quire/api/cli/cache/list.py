"""`quire cache list`: how many blocks each tier of a running server holds."""

from __future__ import annotations

import argparse

from quire.api.cli.cache.server_call import NEEDS_KEYS, add_server_arguments, show_blocks
from quire.api.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = (
        "example:\n  quire cache list --api-key sk-one\n\n"
        "Of the key's own tenant; of all, if the key is of the group operator.\n"
        f"{NEEDS_KEYS}"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return show_blocks(args, "/v1/cache")
