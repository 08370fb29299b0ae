"""`use_beam_search`, as vLLM's clients ask for it: `n` is the width, and all beams come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.api.server.errors import bad_request
from quire.beam_params import BeamSearchParams
from quire.params import SamplingParams

NEUTRAL = {"length_penalty": 1.0, "early_stopping": False}
SHARED = {spec.name for spec in fields(BeamSearchParams)} & set(SamplingParams.__dataclass_fields__)
# What clients send though nothing is drawn; a temperature may be 0, too.
HARMLESS = SHARED | {"n", "seed"}


def beam_search(
    params: SamplingParams, asked: Mapping[str, Any], is_on: bool, stream: bool
) -> BeamSearchParams | None:
    """None unless `is_on`. Raises for what beams cannot do, and for their fields without it."""
    given = {name: value for name, value in asked.items() if value is not None}
    if not is_on:
        for name, value in given.items():
            if value != NEUTRAL[name]:
                raise bad_request(f"{name} needs use_beam_search=true.", param=name)
        return None
    if stream:
        raise bad_request(
            "use_beam_search cannot stream: the best beams are known only at the end.",
            param="stream",
        )
    for spec in fields(params):
        value = getattr(params, spec.name)
        is_greedy = spec.name == "temperature" and params.is_greedy
        if spec.name not in HARMLESS and value != spec.default and not is_greedy:
            raise bad_request(
                f"{spec.name} cannot be combined with use_beam_search; leave it out.",
                param=spec.name,
            )
    shared = {name: getattr(params, name) for name in SHARED}
    return BeamSearchParams(beam_width=params.n, **shared, **given)
