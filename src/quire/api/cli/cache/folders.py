"""The arguments of the commands that look into folders of the SSD cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from quire.api.cli.parser import CommandParser


def add_folder_arguments(parser: CommandParser) -> None:
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a cache folder")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each folder, on one line"
    )


def for_each_folder(args: argparse.Namespace, act: Callable[[Path, bool], int]) -> int:
    """Call `act(folder, as_json)` for each; the exit status is the worst of theirs."""
    return max([act(folder.expanduser(), args.json) for folder in args.folders])
