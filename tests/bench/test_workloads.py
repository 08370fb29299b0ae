"""The workloads are those that other engines were measured on."""

from __future__ import annotations

import pytest

from quire.bench.engine.workloads import SAYS, WORKLOADS, random_prompt, workload
from quire.errors import ConfigError


def test_nano_is_the_published_one() -> None:
    load = workload("nano")
    assert len(load.prompts) == 256
    assert sum(map(len, load.prompts)) == 142_827
    assert load.output_tokens == 133_966
    assert {params.temperature for params in load.params} == {0.6}
    assert all(params.ignore_eos for params in load.params)
    assert load.settings == {"max_model_len": 4096}


def test_prefix_shares_what_it_says() -> None:
    prompts = workload("prefix").prompts
    common = max(prompts, key=len)[:512]
    sharing = [prompt for prompt in prompts if prompt[:512] == common]
    assert (len(prompts), len(sharing)) == (100, 70)
    assert all(64 <= len(prompt) - 512 <= 256 for prompt in sharing)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_warm_up_has_as_many_requests_and_little_to_do(name: str) -> None:
    load = workload(name)
    warm = load.warm_up()
    assert len(warm.prompts) == len(load.prompts)
    assert warm.longest == max(map(len, load.prompts)) + 4
    assert warm.beam_width == load.beam_width
    assert warm.output_tokens == 4 * len(load.prompts) * load.beam_width


def test_beams_are_what_they_say() -> None:
    load = workload("beams")
    assert (len(load.prompts), load.beam_width) == (16, 4)
    assert load.output_tokens == 16 * 4 * 128
    assert all(params.ignore_eos for params in load.params)


def test_each_is_described() -> None:
    assert list(SAYS) == list(WORKLOADS)


def test_prompts_are_the_same_again_and_differ_by_seed() -> None:
    assert random_prompt(9, seed=1) == random_prompt(9, seed=1) != random_prompt(9, seed=2)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="no workload 'nanno'; there are nano, square, prefix"):
        workload("nanno")
