"""`quire cache clear`: removes the cache's files, and no others, from a folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.api.cli.cache.folders import add_folder_arguments, for_each_folder
from quire.api.cli.parser import CommandParser
from quire.progress import human_bytes


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = "example:\n  quire cache clear ~/kv\n"
    add_folder_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return for_each_folder(args, _clear)


def _clear(folder: Path, as_json: bool) -> int:
    from quire.kv.tiers.ssd.inspector import clear

    freed = clear(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "freed_bytes": freed}))
    else:
        print(f"{folder}: {human_bytes(freed)} freed")
    return 0
