"""An argument parser that fills itself in late and answers mistakes with one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

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

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self._refuse(extra[0])
        return found, extra

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
        self.error(f"There is no flag {flag}{did_you_mean(flag, self.flags())}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")
