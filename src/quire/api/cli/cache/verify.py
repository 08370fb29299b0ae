"""`quire cache verify`: reads every block of a folder and drops those that are not whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from quire.api.cli.cache.folders import add_folder_arguments, for_each_folder
from quire.api.cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = "example:\n  quire cache verify ~/kv\n"
    add_folder_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return for_each_folder(args, _verify)


def _verify(folder: Path, as_json: bool) -> int:
    """The exit status is 1 if anything was dropped."""
    from tqdm import tqdm

    from quire.kv.tiers.ssd.inspector import verify

    with ExitStack() as bars:

        def start(total: int) -> Callable[[], object]:
            bar = tqdm(total=total, desc=str(folder), unit="block", disable=None, leave=False)
            update: Callable[[], object] = bars.enter_context(bar).update
            return update

        found = verify(folder, start)
    bad = {reason: count for reason, count in found.items() if reason != "whole" and count}
    if as_json:
        print(json.dumps({"folder": str(folder), **found}))
    else:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in bad.items())
        print(f"{folder}: {found['whole']:,} blocks are whole; {dropped or 'none'} dropped")
    return 1 if bad else 0
