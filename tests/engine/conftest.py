"""Every test of the engine's own goes both ways: one step after another, and overlapped."""

from __future__ import annotations

from collections.abc import Iterator

import fake_model
import pytest

BOTH_WAYS = {
    "test_adapter_exchange",
    "test_adapter_machine",
    "test_adapters",
    "test_beams",
    "test_grammar_steps",
    "test_parts_of_blocks",
    "test_recovery",
    "test_scheduler",
    "test_state_machine",
    "test_tiering",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS and metafunc.cls is None:
        metafunc.fixturenames.append("overlap")
        metafunc.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"], indirect=True)


@pytest.fixture
def overlap(request: pytest.FixtureRequest) -> Iterator[bool]:
    fake_model.OVERLAP.append(request.param)
    yield request.param
    fake_model.OVERLAP.pop()


@pytest.fixture
def windows(request: pytest.FixtureRequest) -> Iterator[tuple[int | None, ...]]:
    """Of the KV groups of the test's models."""
    fake_model.WINDOWS.append(request.param)
    yield request.param
    fake_model.WINDOWS.pop()


@pytest.fixture(autouse=True)
def _engines_are_closed() -> Iterator[None]:
    """Or else the threads of their tiers would live as long as the tests do: thousands of them."""
    yield
    for engine in list(fake_model.OPEN):
        engine.close()
