"""Sampling parameters: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import QuireError, RequestError
from quire.params import SamplingParams, check_against_vocab

FIELDS = {field.name: field for field in dataclasses.fields(SamplingParams)}
LISTS = ("stop", "stop_token_ids", "logit_bias")


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.max_tokens, params.n) == (1.0, 1.0, 16, 1)
    assert params.top_k in (0, -1)
    assert (params.min_p, params.repetition_penalty, params.stop) == (0.0, 1.0, ())
    assert params.seed is None and params.logprobs is None


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 0},
        {"n": 129},
        {"n": True},
        {"n": 2.0},
        {"best_of": 0},
        {"n": 3, "best_of": 2},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: 101}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": [1, 2]},
        {"stop": ""},
        {"stop": [""]},
        {"stop": "x" * 1025},
        {"stop": [str(i) for i in range(65)]},
        {"stop": [1]},
        {"stop": b"x"},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"stop_token_ids": "12"},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": list(range(1025))},
        {"include_stop_str_in_output": 1},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"max_tokens": -1},
        {"max_tokens": 2**31},
        {"max_tokens": 0},
        {"ignore_eos": "yes"},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"seed": 0.5},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"skip_special_tokens": None},
    ],
    ids=lambda settings: repr(settings)[:40],
)
def test_a_bad_value_is_named_in_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    message = str(caught.value)
    assert list(settings)[-1] in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": -1}, -1),
        ({"top_k": 10**6}, 10**6),
        ({"temperature": 0}, 0.0),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"n": np.int64(3)}, 3),
        ({"n": 2, "best_of": 2}, 2),
        ({"max_tokens": None, "min_tokens": 100}, 100),
        ({"min_tokens": 100, "max_tokens": None}, None),
        ({"prompt_logprobs": 0, "max_tokens": 0}, 0),
        ({"seed": -(2**63)}, -(2**63)),
        ({"seed": 2**64 - 1}, 2**64 - 1),
        ({"logprobs": 0}, 0),
        ({"logprobs": None}, None),
        ({"stop": None}, ()),
        ({"stop_token_ids": None}, ()),
        ({"stop_token_ids": np.array([1, 2])}, (1, 2)),
        ({"logit_bias": None}, None),
        ({"logit_bias": {}}, {}),
        ({"logit_bias": {np.int64(3): 1}}, {3: 1.0}),
    ],
    ids=repr,
)
def test_good_values_are_kept(settings: dict[str, Any], kept: Any) -> None:
    """The last of them, as a plain value of Python's; the other fields have their defaults."""
    params = SamplingParams(**settings)
    found = getattr(params, list(settings)[-1])
    assert (type(found), found) == (type(kept), kept)
    others = [name for name in FIELDS if name not in settings]
    defaults = SamplingParams()
    assert all(getattr(params, name) == getattr(defaults, name) for name in others)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        stop="end",
        stop_token_ids=[np.int32(4), 4],
        n=np.int64(2),
        temperature=1,
        logit_bias={np.int64(3): 1},
    )
    assert params.stop == ("end",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert params.stop_token_ids == (4,) and type(next(iter(params.stop_token_ids))) is int
    assert type(params.n) is int and type(params.temperature) is float
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "value",
    [0, -1, math.nan, math.inf, -math.inf, 2**31, 10**30, 10**5000, None, True, "x", b"x", [], {},
     object(), 1 + 1j, ["x"] * 10**6, [1] * 10**6, [[1]], {1: {}}],
    ids=lambda value: type(value).__name__ + str(value)[:8] if value != 10**5000 else "huge",
)  # fmt: skip
def test_any_value_is_accepted_or_refused_in_time_and_in_words(name: str, value: Any) -> None:
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert len(str(error)) < 400  # however long the value was
    else:
        accepted = getattr(params, name)
        assert not isinstance(accepted, float) or math.isfinite(accepted)
        assert name not in LISTS or accepted is None or len(accepted) <= 1024


VALUES = st.integers() | st.floats() | st.text("x1 ", max_size=3) | st.lists(st.integers())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES))
def test_no_other_error_escapes(asked: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        SamplingParams(**asked)


def test_an_unknown_name_suggests_the_near_miss() -> None:
    with pytest.raises(RequestError, match=r"did you mean temperature\?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"did you mean max_tokens\?"):
        dataclasses.replace(SamplingParams(), max_token=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="There is no sampling parameter zzz; there are"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_it_stays_an_ordinary_dataclass() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=7)
    assert params.is_greedy is False  # cached: must not spoil what follows
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert dataclasses.replace(params, seed=8).seed == 8
    assert list(inspect.signature(SamplingParams).parameters) == list(FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_every_field_has_help_and_a_check() -> None:
    for name, field in FIELDS.items():
        assert field.metadata["help"] and field.metadata["check"].says, name


def test_helpers() -> None:
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert not SamplingParams().needs_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).needs_penalties
    assert SamplingParams(n=2).num_samples == 2
    assert SamplingParams(n=2, best_of=4).num_samples == 4


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    check_against_vocab(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]), 10)
    with pytest.raises(RequestError, match=r"logit_bias names token 10, .* end at 9"):
        check_against_vocab(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(RequestError, match="stop_token_ids names token 11"):
        check_against_vocab(SamplingParams(stop_token_ids=[3, 11]), 10)


def test_errors_are_value_errors_of_ours() -> None:
    assert issubclass(RequestError, ValueError) and issubclass(RequestError, QuireError)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, quire.params;"
        "heavy = {'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
