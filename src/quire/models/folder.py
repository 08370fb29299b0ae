"""A Hugging Face folder without its weights: the model's shape and its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.json_fields import token_ids

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(folder: Path) -> ModelConfig:
    """From config.json; generation_config.json may know more tokens that end a text."""
    if not (folder / "config.json").exists() and (gguf := next(folder.glob("*.gguf"), None)):
        raise ModelError(f"{folder} holds GGUF files: name the file itself, as in {gguf}.")
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        ends = (token_ids(raw, "eos_token_id"), token_ids(read_json(generation), "eos_token_id"))
        raw["eos_token_id"] = [*ends[0], *ends[1]]
    return ModelConfig.from_hf(raw)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from quire.models.tokenizer import Tokenizer

    return Tokenizer.from_folder(folder)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}, so it is not a model.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise ModelError(f"{path} is not valid JSON: download it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object: download it again.")
    return content
