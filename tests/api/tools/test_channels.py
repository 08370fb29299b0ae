"""Parameters of a chat with a model that writes in channels."""

from __future__ import annotations

import pytest

from quire.api.tools.channels import with_special_tokens
from quire.beam_params import BeamSearchParams
from quire.params import SamplingParams


@pytest.mark.parametrize("wrong", ["x", 3, BeamSearchParams(), [3], [None], {"n": 1}])
def test_what_are_no_parameters_is_left_to_be_refused(wrong: object) -> None:
    assert with_special_tokens(wrong) == wrong


@pytest.mark.parametrize("params", [None, SamplingParams(n=2), [SamplingParams(n=3)]])
def test_tags_are_in_the_text(params: object) -> None:
    made = with_special_tokens(params)
    for each in made if isinstance(made, list) else [made]:
        assert not each.skip_special_tokens
