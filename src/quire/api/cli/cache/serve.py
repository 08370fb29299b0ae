"""`quire cache serve`: one host pool and one SSD folder for the engines of this machine."""

from __future__ import annotations

import argparse
import logging
import signal
from dataclasses import fields
from pathlib import Path

from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.progress import say

EXAMPLES = """example:
  quire cache serve ~/kv --ssd-cache-bytes 100GiB --host-cache-bytes 16GiB
  quire serve --remote-cache-url quire://$HOME/kv/quire-kv.sock

The second line is for each engine. Only this user can open the socket. The engines may start before
the server, and go on without it while it is away.
"""
SOCKET = "quire-kv.sock"
SETTINGS = frozenset({"ssd_cache_bytes", "host_cache_bytes", "tenant_cache_share"})


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a cache folder")
    parser.add_argument(
        "--socket", metavar="PATH", type=Path, help=f"where to listen (default: DIR/{SOCKET})"
    )
    others = {spec.name for spec in fields(EngineConfig)} - SETTINGS
    add_flags(parser, EngineConfig, "the cache", skip=others)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig.create(**given(EngineConfig, args))
    if config.ssd_cache_bytes is None:
        raise ConfigError("Say how much room the folder has: set ssd_cache_bytes.")
    folders = [folder.expanduser().absolute() for folder in args.folders]
    path = (args.socket or folders[0] / SOCKET).expanduser().absolute()

    from quire.kv.tiers.shared.server import CacheServer
    from quire.kv.tiers.shared.settings import CacheSettings

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    settings = CacheSettings(
        folders, config.ssd_cache_bytes, config.host_cache_bytes, config.tenant_cache_share
    )
    ends = {signal.SIGINT, signal.SIGTERM}
    # Before there are threads, which inherit it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        server = CacheServer(path, settings)
        say(f"serving at {server.url}")
        signal.sigwait(ends)
        server.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0
