"""`quire quantize`: a folder in 16 or 32 bits, written anew in four."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.models.checkpoints.origin import announce
from quire.quantize.settings import CalibrationConfig

EXAMPLES = """examples:
  quire quantize Qwen/Qwen3-0.6B qwen3-0.6b-int4
  quire quantize ./my-model ./my-model-int4 --text what-it-will-read.txt
  quire serve ./my-model-int4

Every matrix but the embedding, the head and routers gets four bits a number, rounded so that its
products change least over texts that the model writes itself. The folder is in the format of
compressed-tensors, which transformers reads, too.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "quire quantize MODEL OUT [flags]"
    parser.epilog = EXAMPLES
    parser.add_argument("source", metavar="MODEL", help="a Hugging Face folder or repository")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must not exist yet")
    add_flags(parser, CalibrationConfig, "texts")


def run(args: argparse.Namespace) -> int:
    config = CalibrationConfig(**given(CalibrationConfig, args))
    announce(args.source)

    from quire.quantize.quantize import quantize

    print(f"{args.out}: {quantize(args.source, Path(args.out), config)}.", file=sys.stderr)
    return 0
