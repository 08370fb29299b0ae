"""`import quire` and `quire --help` are quick because nothing heavy is imported before its use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llm import write_config

import quire

HEAVY = ["torch", "numpy", "transformers", "tokenizers", "gguf", "safetensors", "jinja2", "tqdm"]

LIGHT_STATEMENTS = [
    "import quire",
    "import quire.config, quire.errors, quire.params",
    "from quire import SamplingParams, ConfigError",
    "import quire.api.cli.generate, quire.api.cli.chat, quire.api.cli.cache, quire.api.cli.serve",
]


def heavy_modules_after(statement: str) -> str:
    code = f"import sys\n{statement}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("statement", LIGHT_STATEMENTS)
def test_imports_nothing_heavy(statement: str) -> None:
    assert heavy_modules_after(statement) == "[]"


def test_help_imports_nothing_heavy() -> None:
    run_help = "import quire.api.cli\ntry: quire.api.cli.main(['--help'])\nexcept SystemExit: pass"
    assert heavy_modules_after(run_help).endswith("[]")


@pytest.mark.parametrize("words", [["completion", "bash"], ["info"], ["simulate", "--help"]])
def test_what_only_tells_something_does_without_torch(words: list[str]) -> None:
    run = f"import quire.api.cli\ntry: quire.api.cli.main({words})\nexcept SystemExit: pass"
    assert "torch" not in heavy_modules_after(run).splitlines()[-1]


def test_the_server_does_not_import_torch() -> None:
    assert "torch" not in heavy_modules_after("import quire.api.server.serve")


@pytest.mark.parametrize("name", quire.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        _ = quire.Lllm


ROOMS = ["simulate.command", "bench.engine.replicas", "replicas.fleet", "ranks"]


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_an_extra_is_not_imported_without_need(room: str) -> None:
    """A plain install has none of these."""
    extras = ["aiohttp", "matplotlib", "ray", "redis", "transformers"]
    code = f"import sys, quire.{room}\nprint([name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_model_starts_without_what_takes_torch_seconds(tmp_path: Path) -> None:
    """Torch imports these when it is asked for something unusual."""
    write_config(tmp_path)
    slow = ["sympy", "torch._dynamo", "torch._inductor", "torch.onnx"]
    code = f"""import sys; from quire import LLM
with LLM({str(tmp_path)!r}, load_format="dummy", device="cpu", num_blocks=8, use_tqdm=False) as llm:
    llm.generate([[1, 2, 3]], use_tqdm=False)
print([name for name in {slow} if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
