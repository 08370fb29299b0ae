"""`quire cache`: one file for each action, imported when it is called.

An action's module has `add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

from quire.api.cli.parser import CommandParser

ACTIONS = {
    "stat": "show what a cache folder holds, by namespace",
    "verify": "read every block, count those that are whole, drop those that are not",
    "serve": "share a cache folder and host memory between the engines of this machine",
    "clear": "remove the cache's files, and no others, from a folder",
    "list": "count what each tier of a running server holds",
    "pin": "keep a prefix for a time in the tiers of a running server",
    "delete": "delete a prefix, or all of a tenant's, from every tier of a running server",
}

EXAMPLES = """examples:
  quire cache stat ~/kv
  quire cache verify ~/kv
  quire cache clear ~/kv
  quire cache stat /fast/kv /slow/kv --json
  quire cache serve ~/kv --ssd-cache-bytes 100GiB --host-cache-bytes 16GiB
  quire cache list --api-key sk-one
  quire cache pin --prompt "$(cat system.txt)" --seconds 3600 --api-key sk-one
  quire cache delete --everything --api-key sk-one

DIR is a folder that --ssd-cache-dir has named. Only stat works while an engine uses it.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, line in ACTIONS.items():
        description = f"{line[0].upper()}{line[1:]}."
        actions.add_parser(
            name, help=line, description=description, fill=partial(_add_arguments, name)
        )


def run(args: argparse.Namespace) -> int:
    return int(import_module(f"{__name__}.{args.action}").run(args))


def _add_arguments(action: str, parser: CommandParser) -> None:
    import_module(f"{__name__}.{action}").add_arguments(parser)
