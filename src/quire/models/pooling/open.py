"""Whether a model pools, and what it is then read from."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.checkpoints.dummy import SHAPES
from quire.models.checkpoints.json_file import read_json
from quire.models.encoders.families import encoder_family
from quire.models.hf_config import read_architecture
from quire.models.pooling.decoder_source import DecoderSource, causal_architecture
from quire.models.pooling.encoder_source import EncoderSource
from quire.models.pooling.facts import AUTO, GENERATE
from quire.models.pooling.recipe import read_recipe
from quire.models.pooling.source import PoolingFolder, PoolingSource
from quire.models.registry import FAMILIES
from quire.models.source import find


def open_pooling(name: str, task: str, weights: bool, progress: bool) -> PoolingSource | None:
    """The model to pool with; None: it is one that generates, or not known at all.

    With `task` "auto" those pool that can do nothing else, and sentence-transformers folders.
    """
    if task == GENERATE or (task == AUTO and name in SHAPES):
        return None
    path = find(name, weights, progress)
    if not path.is_dir():
        if task == AUTO:
            return None
        raise ModelError(
            f"task={task!r} needs a Hugging Face folder or repository, and {name} is a file: name "
            f"one of these."
        )
    recipe = read_recipe(path)
    config = (path / recipe.transformer if recipe is not None else path) / "config.json"
    if not config.is_file():
        return None
    raw = read_json(config)
    architecture = read_architecture(raw)
    folder = PoolingFolder(path, raw, architecture, recipe)
    encoder = encoder_family(architecture)
    if encoder is not None:
        return EncoderSource(folder, encoder, task)
    is_only_body = architecture not in FAMILIES and causal_architecture(architecture) in FAMILIES
    if task != AUTO or recipe is not None or is_only_body:
        return DecoderSource(folder, task)
    return None
