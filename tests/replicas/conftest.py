from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    """A model that starts at once."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path))
