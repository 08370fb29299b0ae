"""What a replica runs on: how fast it computes and moves bytes, measured or from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.checks import refuse_unknown
from quire.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Bytes, operations and seconds; rates are a second's. `costs.py` says what follows."""

    memory: float  # of the device, in bytes
    weights: float  # bytes of weights that a step reads
    matrix: float  # operations of matrix products
    kv: float  # bytes of KV that decodes read
    attention: float  # operations of a prompt's attention
    step: float  # seconds of any step, whatever is in it …
    prompt: float = 0.0  # … and of one with part of a prompt
    draw: float = 0.0  # seconds for each token that is drawn
    bend: float = 8.0  # how sharply reading weights turns into multiplying; `costs.py`
    # Pairs of a step's tokens and how many times as long it takes as all that says; between them
    # by the logarithm of the tokens.
    curve: tuple[tuple[float, float], ...] = ()
    overlap: bool = True  # a step is planned while the one before it runs
    host_read: float = 55e9
    host_write: float = 55e9
    ssd_read: float = 3.7e9
    ssd_write: float = 1.9e9
    remote_read: float = 1.2e9
    remote_write: float = 1.0e9
    remote_latency: float = 0.001  # seconds until a far store says what it has

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_time = field.name in ("step", "prompt", "draw", "remote_latency")
            if field.name == "overlap":
                continue
            if field.name == "curve":
                object.__setattr__(self, "curve", _curve(value))
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{field.name} of --rates is a number, not {value!r}.")
            if not (0 <= value < float("inf")) or (value == 0 and not is_time):
                raise ConfigError(f"{field.name} of --rates is {value!r}; give a number above 0.")


def _curve(pairs: Any) -> tuple[tuple[float, float], ...]:
    try:
        curve = tuple((float(tokens), float(factor)) for tokens, factor in pairs)
    except (TypeError, ValueError):
        curve = ((0.0, 0.0),)
    tokens = [pair[0] for pair in curve]
    if tokens != sorted(set(tokens)) or not all(0 < x < float("inf") for p in curve for x in p):
        raise ConfigError("curve of --rates is pairs of numbers above 0, the first of them rising.")
    return curve


# One H200 in bfloat16; docs/simulator.md has these beside what was measured.
GPUS = {
    "h200": Machine(
        memory=139.8 * 2**30,
        weights=4.28e12,
        matrix=640e12,
        kv=4.1e12,
        attention=602e12,
        step=0.47e-3,
        prompt=0.4e-3,
        draw=5e-6,
        bend=2.0,
    ),
}


def read_rates(path: str, gpu: Machine) -> Machine:
    """The rates of a JSON file in place of a GPU's, those that it names."""
    try:
        found: Any = json.loads(Path(path).read_text())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--rates {path} cannot be read: {reason}; give another.") from None
    except ValueError:
        raise ConfigError(f"--rates {path} is not JSON; see docs/simulator.md.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--rates {path} is no JSON object; see docs/simulator.md.")
    refuse_unknown(Machine, found, ConfigError, "rate")
    return Machine(**{**vars(gpu), **found})
