"""What can be typed behind `quire`, read from its parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from quire.api.cli.parser import CommandParser
from quire.api.cli.terminal import one_line
from quire.config import EngineConfig

FILES = ("FILE", "PATH", "DIR", "MODEL")  # what stands for a file's or a folder's name in a help
FILE_SETTINGS = ("model", "speculative", "tensorboard", "api_keys_file", "ssd_cache_dir")
HELP_WIDTH = 70


@dataclass(frozen=True)
class Flag:
    name: str
    help: str
    takes_value: bool
    takes_file: bool
    values: tuple[str, ...]  # all that it takes, where they are few


@dataclass(frozen=True)
class Command:
    path: str  # `bench latency`; empty for `quire` itself
    flags: list[Flag]
    subcommands: dict[str, str]  # with their help
    words: tuple[str, ...]  # that may stand here, besides files
    takes_file: bool

    def taking(self, *, files: bool) -> list[str]:
        """The flags whose value is a file, or else any text."""
        return [
            flag.name
            for flag in self.flags
            if flag.takes_value and not flag.values and flag.takes_file == files
        ]


def commands(parser: CommandParser, path: str = "") -> Iterator[Command]:
    """The command of `parser` and, behind it, all that are below."""
    parser.fill()
    yield _command(parser, path)
    for name, each in parser.subcommands().items():
        yield from commands(each, f"{path} {name}".strip())


def _command(parser: CommandParser, path: str) -> Command:
    flags = [
        _flag(parser, action, name)
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    ]
    words: tuple[str, ...] = ()
    takes_file = False
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            words += (EngineConfig.model,) if action.metavar == "MODEL" else _values(action)
            takes_file |= _takes_file(action)
    below = {
        choice.dest: choice.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }
    return Command(path, flags, below, words, takes_file)


def _flag(parser: CommandParser, action: argparse.Action, name: str) -> Flag:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    says = one_line(text, HELP_WIDTH)
    return Flag(name, says, action.nargs != 0, _takes_file(action), _values(action))


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return tuple(metavar[1:-1].split(",")) if metavar.startswith("{") else ()


def _takes_file(action: argparse.Action) -> bool:
    return action.metavar in FILES or action.dest in FILE_SETTINGS
