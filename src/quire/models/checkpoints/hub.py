"""Models by repository name, from the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ModelError
from quire.progress import draws_bars

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WORDS_AND_SHAPE = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS = "*.safetensors"
NOT_NEEDED = ("original/*", "consolidated*", "onnx/*")


def cached_folder(name: str) -> Path:
    """Where the library keeps a repository, whether or not it is there yet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def fetch(name: str, weights: bool, progress: bool) -> Path:
    """The folder of a repository's files, downloaded unless they are there already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = [*WORDS_AND_SHAPE, WEIGHTS] if weights else [*WORDS_AND_SHAPE]
    try:
        with bars(progress and draws_bars()):
            return Path(
                snapshot_download(name, allow_patterns=patterns, ignore_patterns=[*NOT_NEEDED])
            )
    except GatedRepoError:
        raise ModelError(
            f"{name} is open only to those its owners let in: ask for access on its page, then "
            f"log in with `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{name} is neither a folder here nor a model on the Hugging Face Hub: check the "
            f"spelling, or log in with `hf auth login` if it is private."
        ) from None
    except Exception as error:  # whatever the network, the disk or the library came up with
        raise ModelError(
            f"{name} is not a folder here and could not be fetched from the Hugging Face Hub "
            f"({reason(error)}): check the connection, or give a folder or a .gguf file."
        ) from error


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Whether downloads show their progress; the library has one switch for all of them."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def reason(error: Exception) -> str:
    """The first line of what went wrong, without a full stop, for use inside a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")
