"""`quire cache`: looks into the folders of the SSD cache, checks them, empties them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.api.cli.parser import CommandParser
from quire.api.cli.terminal import dim
from quire.progress import human_bytes

if TYPE_CHECKING:
    from quire.kv.tiers.ssd.inspector import FolderFacts

ACTIONS = {
    "stat": "show what a cache folder holds, by namespace",
    "verify": "read every block, count those that are whole, drop those that are not",
    "clear": "remove the cache's files, and no others, from a folder",
}

EXAMPLES = """examples:
  quire cache stat ~/kv
  quire cache verify ~/kv
  quire cache clear ~/kv
  quire cache stat /fast/kv /slow/kv --json

DIR is a folder that --ssd-cache-dir has named. Only stat works while an engine uses it.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, line in ACTIONS.items():
        actions.add_parser(
            name,
            help=line,
            description=f"{line[0].upper()}{line[1:]}.",
            fill=partial(_add_action_arguments, name),
        )


def _add_action_arguments(name: str, parser: CommandParser) -> None:
    parser.epilog = f"example:\n  quire cache {name} ~/kv\n"
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a cache folder")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each folder, on one line"
    )


def run(args: argparse.Namespace) -> int:
    act: Callable[[Path, bool], int] = {"stat": _stat, "verify": _verify, "clear": _clear}[
        args.action
    ]
    return max([act(folder.expanduser(), args.json) for folder in args.folders])


def _stat(folder: Path, as_json: bool) -> int:
    from quire.kv.tiers.ssd.inspector import stat

    facts = stat(folder)
    if as_json:
        print(json.dumps(asdict(facts)))
        return 0
    print(folder)
    for label, value in _shown(facts).items():
        print(f"  {dim(f'{label:<9}', sys.stdout)} {value}")
    for root, share in sorted(facts.namespaces.items(), key=lambda item: -item[1].blocks):
        size = human_bytes(share.blocks * facts.image_bytes)
        used = _ago(share.last_use_ns)
        print(f"  namespace {root[:16]}…  {share.blocks:,} blocks, {size}, last used {used}")
    return 0


def _shown(facts: FolderFacts) -> dict[str, str]:
    image = human_bytes(facts.image_bytes)
    torn = f", {facts.torn:,} torn" if facts.torn else ""
    held = human_bytes(facts.blocks * facts.image_bytes)
    return {
        "blocks": f"{facts.blocks:,} of {facts.slots:,} ({held}){torn}",
        "on disk": human_bytes(facts.bytes_on_disk),
        "block": f"{facts.block_size} tokens, {image}, layout {facts.layout_version}",
        "last use": _ago(facts.last_use_ns),
        "in use": "by a running engine" if facts.is_in_use else "no",
    }


def _ago(stamp_ns: int) -> str:
    if not stamp_ns:
        return "never"
    seconds = max(0.0, time.time() - stamp_ns / 1e9)
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


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


def _clear(folder: Path, as_json: bool) -> int:
    from quire.kv.tiers.ssd.inspector import clear

    freed = clear(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "freed_bytes": freed}))
    else:
        print(f"{folder}: {human_bytes(freed)} freed")
    return 0
