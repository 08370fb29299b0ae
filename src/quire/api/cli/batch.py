"""`quire batch`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.api.cli.engine import add_engine_arguments, engine_settings
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.api.server.settings import ServerConfig
from quire.config import EngineConfig
from quire.models.checkpoints.origin import announce

if TYPE_CHECKING:
    from quire.api.server.batch.offline import Progress

EXAMPLES = """examples:
  quire batch requests.jsonl results.jsonl
  quire batch requests.jsonl results.jsonl Qwen/Qwen3-0.6B --max-num-seqs 256

A line of requests.jsonl, on one line:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}}

If it is killed, run it again: it goes on with the lines that have no result yet.
"""

FLAGS = (
    "served_model_name",
    "tool_format",
    "reasoning_parser",
    "chat_template",
    "max_body_bytes",
    "batch_concurrency",
)
INTERRUPTED = 130


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "quire batch REQUESTS RESULTS [MODEL] [flags]"
    parser.epilog = EXAMPLES
    parser.add_argument("requests", metavar="REQUESTS", help="a file with a request on each line")
    parser.add_argument(
        "results", metavar="RESULTS", help="a file for the results, in the order they come"
    )
    others = [spec.name for spec in fields(ServerConfig) if spec.name not in FLAGS]
    add_flags(parser, ServerConfig, "requests", skip=others)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    settings = ServerConfig(log_requests=False, **given(ServerConfig, args))
    engine = EngineConfig.create(**engine_settings(args))
    announce(engine.model, engine.load_format)

    from quire.api.server.batch.offline import answer_file

    is_watched = sys.stderr.isatty()
    with _Bar(is_watched) as bar:
        end = answer_file(
            Path(args.requests),
            Path(args.results),
            settings,
            engine,
            bar.show,
            shows_start=is_watched,
        )
    wrong = f", {end.num_errors:,} of them with an error" if end.num_errors else ""
    print(f"{end.done:,} of {end.total:,} lines have a result{wrong}.", file=sys.stderr)
    return 0 if end.is_over else INTERRUPTED


class _Bar:
    """On a terminal, how many lines have a result, and at what rate."""

    def __init__(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        if not self._is_watched:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=progress.total, initial=progress.done, desc="lines", unit="line")
        self._bar.update(progress.done - self._bar.n)
