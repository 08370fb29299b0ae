"""`quire serve`: a model over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import logging

from quire.api.cli.engine import add_engine_arguments, engine_settings
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.api.server.settings import ServerConfig
from quire.config import EngineConfig
from quire.gc_control import nothing_is_garbage
from quire.models.checkpoints.origin import announce

EXAMPLES = """examples:
  quire serve
  quire serve Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8080 --api-keys-file keys.txt
  quire serve model.gguf --served-model-name my-model --host-cache-bytes 8GiB
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "quire serve [MODEL] [flags]"
    parser.epilog = EXAMPLES
    add_flags(parser, ServerConfig, "server settings")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = ServerConfig(**given(ServerConfig, args))
    engine = EngineConfig.create(**engine_settings(args))
    announce(engine.model, engine.load_format)

    with nothing_is_garbage():
        from quire.api.server.serve import serve

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    return serve(settings, engine)
