"""The `quire` command: one file for each command, imported when it is called.

A command's module has `add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from quire.api.cli.parser import CommandParser
from quire.api.flag_names import in_flags
from quire.errors import QuireError
from quire.gc_control import search_no_more

COMMANDS = {
    "serve": "serve a model over OpenAI's HTTP API",
    "generate": "generate text for one prompt or many",
    "batch": "answer a file of requests, and go on where a run was killed",
    "chat": "talk to a model in the terminal",
    "quantize": "write a model anew in four bits a weight",
    "cache": "look into the folders of the SSD cache, check them, empty them",
    "info": "show what this machine has and what Quire would use",
    "bench": "measure throughput, latency, attention, or the prefix index",
    "simulate": "replay a trace on a fleet that is not there: hit rates, latencies, GPU hours",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}

EXAMPLES = """examples:
  quire serve
  quire generate --prompt "The capital of France is" --temperature 0
  quire chat
  quire cache stat ~/kv
  quire info
  quire bench throughput --workload cpu

`quire COMMAND --help` has the flags of each command and more examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every failure is one line on stderr and an exit status."""
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else list(argv))
        finally:
            if argv is None:
                search_no_more()
            sys.stdout.flush()  # now, while a reader that left can still be told from a failure
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left. What is still buffered must not be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except QuireError as error:
        return _report(str(error), 2)
    except Exception as error:
        # What the system says of a file is for users; the text of any other error is not.
        told = f"{type(error).__name__}{f': {error}' if isinstance(error, OSError) else ''}"
        return _report(f"{told} (a bug in Quire; QUIRE_DEBUG=1 shows the traceback)", 1)


def _dispatch(argv: list[str]) -> int:
    parser = make_parser()
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    run = import_module(f"{__name__}.{args.command}").run
    try:
        return int(run(args))
    except QuireError as error:
        error.args = (in_flags(str(error), parser.chosen(args).settings()),)
        raise


def make_parser() -> CommandParser:
    from quire import __version__

    parser = CommandParser(
        prog="quire",
        description="An LLM inference engine whose KV cache is paged, shared and tiered.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        description = f"{line[0].upper()}{line[1:]}."
        commands.add_parser(
            name, help=line, description=description, fill=partial(_add_arguments, name)
        )
    return parser


def _add_arguments(command: str, parser: CommandParser) -> None:
    import_module(f"{__name__}.{command}").add_arguments(parser)


def _report(message: str, status: int) -> int:
    if os.environ.get("QUIRE_DEBUG"):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return status
