"""Each fuzzer at a small size, by a seed that stays and by a new one."""

from __future__ import annotations

import random

import pytest
from effort import IS_LONG, effort

from fuzz import fuzzers, small

FUZZERS = fuzzers()
# The first starts two servers for each run; of the others test_hostile.py has one that stays.
SLOW = {"http_requests", "model_folders", "gguf_headers"}
FIXED, NEW = 1, random.SystemRandom().randrange(10**6)


@pytest.mark.parametrize("name", FUZZERS)
@pytest.mark.parametrize("which", ["the same seed", "a new seed"])
def test_nothing_is_found(name: str, which: str) -> None:
    if name in SLOW and which == "the same seed" and not IS_LONG:
        pytest.skip("make test-long has both seeds")
    seed, count = FIXED if which == "the same seed" else NEW, small(FUZZERS[name]) // effort(6, 2)
    again = f"PYTHONPATH=tests python -m fuzz {name} --seed {seed} --count {count}"
    print(f"to repeat: {again}")
    try:
        FUZZERS[name].run(seed, count)
    except Exception as error:
        error.add_note(f"to repeat: {again}")
        raise


def test_the_fuzzers_are_found() -> None:
    assert {"differential", "http_requests"} <= set(FUZZERS)
