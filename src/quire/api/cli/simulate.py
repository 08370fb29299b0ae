"""`quire simulate`: what a fleet would do with a trace, without a device."""

from __future__ import annotations

import argparse

from quire.simulate.flags import EXAMPLES, add_arguments

__all__ = ["EXAMPLES", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from quire.simulate.command import run

    return run(args)
