"""A Hugging Face folder without its weights: the model's shape and its words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ModelError
from quire.models.checkpoints.json_fields import token_ids
from quire.models.checkpoints.json_file import read_json
from quire.models.config import ModelConfig
from quire.models.hf_config import read_hf_config

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

MODELOPT_FILE = "hf_quant_config.json"  # where older versions of ModelOpt say what they did
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(folder: Path) -> ModelConfig:
    """From config.json; generation_config.json may know more tokens that end a text."""
    if not (folder / "config.json").exists() and (gguf := next(folder.glob("*.gguf"), None)):
        raise ModelError(f"{folder} holds GGUF files: name the file itself, as in {gguf}.")
    raw = read_json(folder / "config.json")
    if not raw.get("quantization_config") and (folder / MODELOPT_FILE).exists():
        told = read_json(folder / MODELOPT_FILE)
        raw["quantization_config"] = {**told, "quant_method": "modelopt"}
    generation = folder / "generation_config.json"
    if generation.exists():
        ends = (token_ids(raw, "eos_token_id"), token_ids(read_json(generation), "eos_token_id"))
        raw["eos_token_id"] = [*ends[0], *ends[1]]
    return read_hf_config(raw)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from quire.models.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(folder)
