"""An argument parser that fills itself in late and answers mistakes with one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quire.api.cli.near_miss import near_flag
from quire.checks import did_you_mean
from quire.errors import QuireError


class UsageError(QuireError):
    """The command line itself is wrong."""


class CommandParser(argparse.ArgumentParser):
    """`fill` adds the arguments when the parser is first used: `quire --help` fills none."""

    def __init__(
        self, *args: Any, fill: Callable[[CommandParser], None] | None = None, **kwargs: Any
    ) -> None:
        manners: dict[str, Any] = {
            "allow_abbrev": False,  # a short form may mean something else in the next release
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }
        super().__init__(*args, **(manners | kwargs))
        self._fill = fill

    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def settings(self) -> list[str]:
        """What the flags set, by the names that it has in Python."""
        return [flag[2:].replace("-", "_") for flag in self.flags() if flag.startswith("--")]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.fill()
        if args is not None and not self.subcommands():
            self._refuse_unknown_flags(args)
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self._refuse(extra[0])
        return found, extra

    def fill(self) -> None:
        """Have the arguments; once is enough."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)

    def subcommands(self) -> dict[str, CommandParser]:
        """By name, where this parser has some."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def chosen(self, args: argparse.Namespace) -> CommandParser:
        """The parser of the subcommand that was called, at any depth."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser: CommandParser = action.choices[getattr(args, action.dest)]
                return parser.chosen(args)
        return self

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None:
        """First of all: argparse would complain of what the same line lacks, instead."""
        for word in args:
            if word == "--":
                return
            if word.startswith("--") and " " not in word and word.split("=")[0] not in self.flags():
                self._refuse(word)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        mend = did_you_mean(str(value), known)
        raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(known)}{mend}")

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"There is no place for {word!r}; put text with spaces in quotes")
        flag = word.split("=")[0]
        self.error(f"There is no flag {flag}{near_flag(flag, self.flags())}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")
