"""The flags that benchmarks share, and how their texts are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from quire.bench.report.table import STDOUT


def add_run_flags(parser: argparse.ArgumentParser, repeat: int, profile: str = "") -> None:
    """`profile` says what the trace would show; empty for a benchmark that has none."""
    parser.add_argument(
        "--repeat",
        "--repeats",
        dest="repeat",
        type=count,
        default=repeat,
        metavar="N",
        help=f"runs of each, after a warm-up; median and spread are shown (default: {repeat})",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        help="write all figures to FILE; without FILE, or with -, to standard output",
    )
    if profile:
        parser.add_argument(
            "--profile",
            metavar="PATH",
            help=f"afterwards profile {profile}: a trace for chrome://tracing or Perfetto goes to "
            "PATH (a name that ends in .json, or a folder), the largest costs and the idle share "
            "are shown",
        )


def count(text: str) -> int:
    return _whole(text, "a whole number from 1")


def counts(text: str) -> list[int]:
    says = "whole numbers from 1 with commas"
    return [_whole(word, says) for word in text.replace(",", " ").split()] or _refuse(text, says)


def checked(read: Callable[[str], Any], says: str) -> Callable[[str], Any]:
    """A reader for argparse whose failure is a sentence."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            return _refuse(text, says)

    return reader


def _whole(text: str, says: str) -> int:
    return int(text) if text.isdecimal() and int(text) > 0 else _refuse(text, says)


def _refuse(text: str, says: str) -> Any:
    raise argparse.ArgumentTypeError(f"takes {says}, not {text!r}")


def listed(lines: Mapping[str, str]) -> str:
    """Names with what they mean, for the end of a help text."""
    width = max(map(len, lines))
    return "".join(f"  {name:<{width}}  {line}\n" for name, line in lines.items())
