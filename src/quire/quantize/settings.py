"""The settings of `quire quantize`, said once; its flags are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.checks import INT32_MAX, apply_checks, setting, whole_number
from quire.config import UINT64_MAX, one_of, text
from quire.errors import ConfigError

FEWEST_TOKENS = 512  # fewer would tell nothing of most inputs


@dataclass(frozen=True)
class CalibrationConfig:
    """The texts that a model is run over, and where."""

    text: str | None = setting(
        None,
        text("a file's path"),
        "a file with text of the kind that the model will read (default: the model writes texts)",
    )
    calibration_tokens: int = setting(
        8192, whole_number(FEWEST_TOKENS, INT32_MAX), "how many tokens the model is run over"
    )
    device: str = setting("auto", one_of("auto", "cpu", "cuda"), "where the model runs")
    seed: int = setting(
        0, whole_number(0, UINT64_MAX >> 1), "seed of the texts that the model writes"
    )

    def __post_init__(self) -> None:
        apply_checks(self, ConfigError)
