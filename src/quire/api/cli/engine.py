"""What the commands that run a model share: MODEL, the engine's flags, and opening the LLM."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser, UsageError
from quire.config import EngineConfig
from quire.lora_request import LoRARequest, read_module
from quire.models.checkpoints.origin import announce

if TYPE_CHECKING:
    from quire.api.llm import LLM


def add_engine_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "named_model",
        metavar="MODEL",
        nargs="?",
        help=f"the model; --model says the same (default: {EngineConfig.model})",
    )
    add_flags(parser, EngineConfig, "engine settings")


def add_adapter_argument(parser: CommandParser) -> None:
    parser.add_argument(
        "--lora-modules",
        metavar="NAME=PATH",
        help="answer with the LoRA adapter in this folder",
    )


def adapter(args: argparse.Namespace) -> LoRARequest | None:
    """What `--lora-modules` names."""
    if args.lora_modules is None:
        return None
    module = read_module(args.lora_modules)
    return LoRARequest(module.name, 1, module.path)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask for, checked; torch is not imported yet."""
    settings = given(EngineConfig, args)
    if args.named_model is not None:
        if "model" in settings:
            raise UsageError("Give the model once: as MODEL or as --model.")
        settings["model"] = args.named_model
    EngineConfig.create(**settings)
    return settings


def open_llm(args: argparse.Namespace) -> LLM:
    """The model that the flags describe; a terminal is told how its start gets on."""
    settings = engine_settings(args)
    if adapter(args) is not None:
        settings = {"max_loras": 1, **settings, "enable_lora": True}
    is_watched = sys.stderr.isatty()
    if is_watched:
        config = EngineConfig.create(**settings)
        announce(config.model, config.load_format)

    from quire.api.llm import LLM

    return LLM(**settings, use_tqdm=is_watched)
