"""`quire completion`: a script that lets a shell complete commands, flags and their values."""

from __future__ import annotations

import argparse
from importlib import import_module

from quire.api.cli.parser import CommandParser

EXAMPLES = """examples:
  quire completion bash
  quire completion zsh
  quire completion fish
"""

INSTALLING = """
to have it in every shell:
  bash  put into ~/.bashrc:  source <(quire completion bash)
  zsh   put into ~/.zshrc, behind compinit:  source <(quire completion zsh)
  fish  once:  quire completion fish > ~/.config/fish/completions/quire.fish
"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES + INSTALLING
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    from quire.api.cli import make_parser
    from quire.api.cli.shells.commands import commands

    script = import_module(f"quire.api.cli.shells.{args.shell}").script
    print(script(list(commands(make_parser()))), end="")
    return 0
