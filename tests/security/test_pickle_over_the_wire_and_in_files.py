"""Pickle over ZMQ or HTTP, in files, or through an adapter endpoint.

CVE-2025-47277, CVE-2025-32444, CVE-2025-30202, CVE-2025-10164, CVE-2026-3059, CVE-2026-3060,
CVE-2026-3989, sglang#30165.
"""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import pytest

import quire
from quire.errors import ModelError
from quire.models.source import open_model

SOURCES = sorted(Path(quire.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile_command", "__import__"}
METHODS = {
    ("torch", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("zmq", "Context"),
}


def offences(tree: ast.AST) -> list[str]:
    """What opens pickled data, or runs what it is given."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _call(node)
    return found


def _call(node: ast.Call) -> list[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        return [function.id]
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = (function.value.id, function.attr)
        if name in METHODS or function.attr in ("recv_pyobj", "send_pyobj"):
            return [".".join(name)]
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    unsafe = [name for name in ("allow_pickle", "shell") if name in given]
    return [f"{name}=…" for name in unsafe if ast.literal_eval(given[name]) is True]


def test_nothing_that_quire_is_made_of_opens_pickled_data():
    assert len(SOURCES) > 100
    found = {path.name: offences(ast.parse(path.read_text())) for path in SOURCES}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "code", ["import pickle", "torch.load(x)", "eval(x)", "np.load(x, allow_pickle=True)"]
)
def test_the_search_finds_what_it_looks_for(code):
    assert offences(ast.parse(code))


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "adapter_model.bin", "consolidated.00.pth"]
)
def test_pickled_weights_are_refused_and_not_opened(tmp_path, tiny_folder, name):
    folder, trap = tmp_path / "model", tmp_path / "sprung"
    folder.mkdir()
    for file in Path(tiny_folder).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(pickle.dumps(Bomb(str(trap))))
    with pytest.raises(ModelError):
        list(open_model(str(folder)).tensors())
    assert not trap.exists()


@pytest.mark.parametrize(
    "path",
    ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter_from_tensors",
     "/update_weights_from_tensor", "/update_weights_from_disk", "/init_weights_update_group"],
)  # fmt: skip
def test_there_is_no_way_to_send_weights_or_adapters(tiny_server, tmp_path, path):
    trap = tmp_path / "sprung"
    with tiny_server.http() as http:
        for content in (pickle.dumps(Bomb(str(trap))), b'{"lora_name": "x", "lora_path": "/etc"}'):
            for kind in ("application/json", "application/octet-stream"):
                answer = http.post(path, content=content, headers={"Content-Type": kind})
                assert answer.status_code == 404
    assert not trap.exists()
