"""`quire cache stat`: what a cache folder holds, by namespace."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.api.cli.cache.folders import add_folder_arguments, for_each_folder
from quire.api.cli.parser import CommandParser
from quire.api.cli.terminal import dim
from quire.progress import human_bytes

if TYPE_CHECKING:
    from quire.kv.tiers.ssd.inspector import FolderFacts


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = "example:\n  quire cache stat ~/kv\n"
    add_folder_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return for_each_folder(args, _stat)


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
