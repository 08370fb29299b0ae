"""Models that are quantised while they are loaded: by `--quantization`, or with random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import ModelError
from quire.layers.formats import AllDense, Dense, MatrixFormat, MatrixFormats
from quire.layers.quantized.grouped import MADE_GROUP, Grouped
from quire.layers.quantized.matrix import QuantizedFormat
from quire.layers.quantized.scaled import Fp8, Int8
from quire.models.config import ModelConfig
from quire.models.quantization.names import is_embedding, stays_dense

MADE: dict[str, QuantizedFormat] = {
    "fp8": Fp8(makes=True),
    "int8": Int8(makes=True),
    "int4": Grouped(makes=True, bits=4, group=MADE_GROUP),
}
VERSION = 2  # of how numbers are quantised: KV of another one is another model's


@dataclass(frozen=True)
class Made:
    """All matrices but the embedding and the head, which checkpoints leave dense as well."""

    quantization: str

    def of(self, *names: str) -> MatrixFormat:
        return Dense() if is_embedding(names) or stays_dense(names) else MADE[self.quantization]


@dataclass(frozen=True)
class MadeLike:
    """As a quantised checkpoint would have them, made of numbers: for random weights."""

    formats: MatrixFormats

    def of(self, *names: str) -> MatrixFormat:
        found = self.formats.of(*names)
        return found.making() if isinstance(found, QuantizedFormat) else found


def quantized_while_loading(config: ModelConfig, name: str, quantization: str) -> ModelConfig:
    """The model with its matrices to be quantised as they are read."""
    if config.formats != AllDense():
        raise ModelError(
            f"{name} is quantised already, so quantization={quantization} cannot be: leave it out, "
            f"or use the model's original weights."
        )
    return replace(config, formats=Made(quantization))


def made_at_random(config: ModelConfig) -> ModelConfig:
    """The model of a quantised checkpoint whose numbers are not read, but made."""
    if config.formats == AllDense():
        return config
    return replace(config, formats=MadeLike(config.formats))


def described(quantization: str) -> str:
    """For the fingerprint of a model: numbers that are quantised in another way are another's."""
    return f"quantised to {quantization}, version {VERSION}"
