"""What a client reads of a bug is one sentence; what was inside is in the log."""

from __future__ import annotations

from pathlib import Path

import httpx
from server_process import ServerProcess
from tiny_llm import write_config

# Python imports it at the start of every process that has its folder in the path.
BROKEN_STEPS = '''
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class BreakSteps(MetaPathFinder):
    """Steps with token 42 raise what they are about."""

    def find_spec(self, name, path, target=None):
        if name != "quire.runner.runner":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        whole = spec.loader.exec_module

        def execute(module):
            whole(module)
            launch = module.ModelRunner.launch

            def broken(runner, plan):
                if 42 in plan.token_ids:
                    raise KeyError(plan)
                return launch(runner, plan)

            module.ModelRunner.launch = broken

        spec.loader.exec_module = execute
        return spec


sys.meta_path.insert(0, BreakSteps())
'''


def test_a_bug_over_http(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ServerProcess.tiny(str(write_config(tmp_path / "tiny")))
    try:
        body = {"model": "tiny", "max_tokens": 4, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        bad = httpx.post(url, json=body | {"prompt": [42]}, timeout=120)
        assert bad.status_code == 500
        message = "The step of this request failed (KeyError); its log has the reason."
        assert bad.json()["error"]["message"] == message
        assert httpx.post(url, json=body | {"prompt": [41]}, timeout=120).status_code == 200
    finally:
        server.stop()
    assert "KeyError: StepPlan(" in server.log
