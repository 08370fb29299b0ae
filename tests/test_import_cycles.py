"""No module of `quire` imports itself by way of others, not even inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quire

Imports = dict[str, set[str]]  # of each module, the modules that it imports


def modules_below(package: Path) -> dict[str, Path]:
    """Every module's file, by the module's name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def names_imported(path: Path) -> Iterator[str]:
    """By any import statement of a file: at its top, in functions or under `TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_below(package: Path) -> Imports:
    modules = modules_below(package)
    imports: Imports = {}
    for module, path in modules.items():
        names = [*names_imported(path)]
        # `from quire.x import y` names a module `y`, or something in the module `quire.x`.
        named = {name if name in modules else name.rpartition(".")[0] for name in names}
        imports[module] = (named & modules.keys()) - {module}
    return imports


def cycle_in(imports: Imports) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = imports_below(Path(quire.__file__).parent)
    assert "quire.errors" in imports["quire.api.llm"]
    assert cycle_in(imports) == []


@pytest.mark.parametrize(
    "back",
    [
        "from pack.a import thing",
        "import pack.a",
        "def f():\n    from pack import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.a import thing",
    ],
)
def test_a_cycle_is_seen_whatever_kind_of_import_closes_it(tmp_path: Path, back: str) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import pack.b\nthing = 1")
    (package / "b.py").write_text("import pack.c")
    (package / "c.py").write_text("")
    assert cycle_in(imports_below(package)) == []
    (package / "c.py").write_text(back)
    assert set(cycle_in(imports_below(package))) == {"pack.a", "pack.b", "pack.c"}
