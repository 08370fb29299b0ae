"""Remote code in a checkpoint taken without the user's word; a template in a GGUF that runs code.

CVE-2026-22807, CVE-2026-27893, CVE-2026-5760, CVE-2024-34359.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.errors import QuireError
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer

TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir(PATH) }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir(PATH) }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ messages.append.__globals__ }}",
    "{{ lipsum.__globals__['os'].mkdir(PATH) }}",
    "{{ namespace.__init__.__globals__['sys'].modules['os'].mkdir(PATH) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ raise_exception.__globals__['__builtins__']['open'](PATH, 'w') }}",
    "{% set _ = messages.clear() %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.mkdir(PATH) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_reaches_nothing_but_the_conversation(template, smollm2_path, tmp_path):
    """Wherever it comes from, it is rendered by the same sandbox."""
    from quire.models.checkpoints.gguf import GGUFSource

    trap = tmp_path / "sprung"
    tokenizer = GGUFSource(smollm2_path).tokenizer()
    assert tokenizer is not None
    own = template.replace("PATH", repr(str(trap)))
    evil = Tokenizer(tokenizer.backend, tokenizer.special_tokens, own)
    try:
        rendered = evil.apply_chat_template([{"role": "user", "content": "hi"}])
    except QuireError as error:
        assert "\n" not in str(error)
    else:
        assert "class" not in rendered and "root:" not in rendered
        assert "<" not in rendered, "a template showed what it is made of"
    assert not trap.exists()


def test_code_beside_the_weights_is_never_imported(tmp_path, tiny_folder):
    folder, trap = tmp_path / "model", tmp_path / "sprung"
    shutil.copytree(tiny_folder, folder)
    code = f"import os; os.mkdir({str(trap)!r})\nclass Model: pass\n"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "__init__.py",
    ):
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    classes = {
        "AutoConfig": "configuration_evil.Model",
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Model", None],
    }
    for changes in ({"auto_map": classes}, {"auto_map": classes, "architectures": ["Evil"]}):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        tokens = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "auto_map": classes}))
        try:
            open_model(str(folder), "dummy").tokenizer()
        except QuireError as error:
            assert "Evil" in str(error)
    assert not trap.exists()


def test_no_setting_trusts_remote_code():
    sources = (Path(__file__).parents[2] / "src").rglob("*.py")
    assert not [path for path in sources if "trust_remote_code" in path.read_text()]
