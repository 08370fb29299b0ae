"""Models from strangers: what would crash, fill the memory, never end or run code is refused.

Each is one sentence, and comes before anything large is made. The fuzzers make the rest of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import effort
from fuzz import gguf_headers, model_folders
from fuzz.model_folders import CONFIG, TOKENIZER_PARTS, read_safetensors, set_field, write_good
from patience import PATIENCE_S

from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.models import source
from quire.models.source import build_model, open_model
from quire.models.text import chat_template
from quire.models.text.chat_template import render
from quire.models.text.template_process import TemplateProcess
from quire.models.text.template_tools import takes_tools
from quire.models.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_good(tmp_path / "model")


def refusal(folder: Path, load_format: str = "auto") -> str:
    with pytest.raises(QuireError) as error:
        build_model(open_model(str(folder), load_format), torch.float32, CPU, progress=False)
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 500
    return message


def test_folders_with_one_thing_spoilt() -> None:
    count = model_folders.SMALL // effort(2, 1)
    outcome = model_folders.run(seed=16, count=count)
    assert len(outcome.worked) + len(outcome.refused) == count
    assert len(outcome.refused) > len(outcome.worked) > 0


def test_gguf_headers_with_anything_changed() -> None:
    count = gguf_headers.SMALL // effort(2, 1)
    outcome = gguf_headers.run(seed=16, count=count)
    assert "nothing changed" in outcome.worked
    assert len(outcome.refused) > count // 2


# --- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**31),
        ("vocab_size", 2**31),
        ("vocab_size", 2**40),
        ("hidden_size", 2**31),
        ("num_attention_heads", 2**31),
        ("head_dim", 2**20),
        ("rope_scaling", "x"),
        ("rope_scaling", ["yarn"]),
        ("rope_parameters", 3),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("rms_norm_eps", 10**400),
        ("dtype", 7),
        ("tie_word_embeddings", "no"),
        ("layer_types", [["full_attention"]] * 2),
        ("max_window_layers", "1"),
        ("architectures", [[]]),
    ],
)
def test_a_field_that_is_none(folder: Path, key: str, value: Any, load_format: str) -> None:
    set_field("config.json", (key,), value, folder)
    message = refusal(folder, load_format)
    assert key in message or "architecture" in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 10**6, '{"a":' * 10**5, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_is_deep_or_has_endless_numbers(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert f"{name} is not valid JSON" in refusal(folder)


def test_a_json_file_of_gigabytes_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(8 << 30)  # which takes no room on the disk
    assert "larger than" in refusal(folder)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "is not a file" in refusal(folder)


def test_remote_code_is_not_run(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    set_field("config.json", ("auto_map",), names, folder)
    opened = open_model(str(folder))
    build_model(opened, torch.float32, CPU, progress=False)
    assert opened.tokenizer() is not None
    assert not (folder / "ran").exists()


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"intermediate_size": 2**24}])
def test_weights_are_held_against_the_config_before_memory_is_taken(
    folder: Path, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_memory(*_: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(source, "take_memory", take_memory)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    assert "not those of the Qwen2ForCausalLM" in refusal(folder)


def test_random_weights_beyond_the_memory_are_refused(folder: Path) -> None:
    sizes = {"intermediate_size": 2**24, "hidden_size": 2**20, "num_hidden_layers": 64}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    message = refusal(folder, "dummy")
    assert "GiB in float32, more than is free on cpu" in message


def test_memory_that_the_system_refuses_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `ulimit -v` or strict overcommitting has the last word."""
    sizes = {"intermediate_size": 2**24, "hidden_size": 2**20, "num_hidden_layers": 64}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    monkeypatch.setattr(source, "free_memory", lambda device: sys.maxsize)
    with pytest.raises(ConfigError, match="more than is free on cpu"):
        build_model(open_model(str(folder), "dummy"), torch.float32, CPU, progress=False)


# --- safetensors --------------------------------------------------------------------------------


def change_header(folder: Path, change: Any) -> None:
    header, data = read_safetensors(folder / "model.safetensors")
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    content = len(text).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)


NORM = "model.norm.weight"
HEADERS: dict[str, Any] = {
    "a dtype that is a list": lambda header: header | {NORM: header[NORM] | {"dtype": []}},
    "a shape that is a number": lambda header: header | {NORM: header[NORM] | {"shape": 32}},
    "a shape of strings": lambda header: header | {NORM: header[NORM] | {"shape": ["32"]}},
    "a shape of true": lambda header: header | {NORM: header[NORM] | {"shape": [True, 32]}},
    "a negative shape": lambda header: header | {NORM: header[NORM] | {"shape": [-1, -32]}},
    "a shape that overflows": (
        lambda header: header | {NORM: header[NORM] | {"shape": [2**62, 2**62, 0]}}
    ),
    "many dimensions": lambda header: header | {NORM: header[NORM] | {"shape": [1] * 10**5}},
    "offsets that overlap": (
        lambda header: header | {NORM: header[NORM] | {"data_offsets": [0, 128]}}
    ),
    "offsets before the data": (
        lambda header: header | {NORM: header[NORM] | {"data_offsets": [-128, 0]}}
    ),
    "offsets past the end": (
        lambda header: header | {NORM: header[NORM] | {"data_offsets": [2**60, 2**60 + 128]}}
    ),
    "offsets that are floats": (
        lambda header: header | {NORM: header[NORM] | {"data_offsets": [0.0, 128.0]}}
    ),
    "a gap": lambda header: {name: entry for name, entry in header.items() if name != NORM},
    "a name twice": lambda header: json.dumps(header).encode()[:-1] + b',"%b":{}}' % NORM.encode(),
    "deep": lambda header: b"[" * 10**6,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(folder: Path, name: str) -> None:
    change_header(folder, HEADERS[name])
    assert "model.safetensors is not a whole safetensors file" in refusal(folder)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1])
def test_a_header_longer_than_the_file(folder: Path, length: int) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    assert f"its header would have {length:,} bytes" in refusal(folder)


@pytest.mark.parametrize("where", ["../other/model.safetensors", "{}/model.safetensors", ".."])
def test_an_index_names_nothing_outside_its_folder(folder: Path, where: str) -> None:
    """The files that a server reads, and what it says of them, are not for a model to choose."""
    other = write_good(folder.parent / "other")
    index = {"weight_map": {NORM: where.format(other)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "something else than files beside it" in refusal(folder)


def test_links_to_files_elsewhere_are_followed(folder: Path) -> None:
    """As in the Hugging Face cache, where each file is one."""
    (folder.parent / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(folder.parent / "blobs" / file.name)
        file.symlink_to(f"../blobs/{file.name}")
    build_model(open_model(str(folder)), torch.float32, CPU, progress=False)


# --- tokenizers ---------------------------------------------------------------------------------


def tokenizer_of(folder: Path) -> Tokenizer:
    found = open_model(str(folder)).tokenizer()
    assert found is not None
    return found


def test_padding_and_truncation_of_any_size_do_nothing(folder: Path) -> None:
    for key in ("padding", "truncation"):
        for value in TOKENIZER_PARTS[key].values():
            set_field("tokenizer.json", (key,), value, folder)
    tokenizer = tokenizer_of(folder)
    assert len(tokenizer.encode("xyz" * 9)) == 27
    assert tokenizer.encode("x") == [tokenizer.backend.token_to_id("x")]


@pytest.mark.parametrize(
    ("key", "label", "reason"),
    [
        ("normalizer", "bomb", "many times longer"),
        ("normalizer", "regex bomb", "many times longer"),
        ("normalizer", "long prefix", "more than 4,096 characters"),
        ("normalizer", "precompiled", "precompiled_charsmap"),
        ("pre_tokenizer", "no regex", "parenthesis"),
        ("pre_tokenizer", "length 0", "length 0"),
        ("post_processor", "unknown token", "does not have"),
        ("post_processor", "many tokens", "more than 64 tokens"),
        ("decoder", "bomb", "many times longer"),
        ("added_tokens", "below 0", "-1"),
    ],
)
def test_a_tokenizer_that_explodes(folder: Path, key: str, label: str, reason: str) -> None:
    set_field("tokenizer.json", (key,), TOKENIZER_PARTS[key][label], folder)
    with pytest.raises(ModelError, match=reason) as error:
        tokenizer_of(folder)
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)


def test_a_regular_expression_that_explodes_ends_in_a_sentence(folder: Path) -> None:
    """The library gives up after ten million steps, by a panic that is no Exception."""
    part = TOKENIZER_PARTS["pre_tokenizer"]["exploding"]
    set_field("tokenizer.json", ("pre_tokenizer",), part, folder)
    tokenizer = tokenizer_of(folder)
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode("a" * 40 + "c")
    assert tokenizer.encode("xy")


@pytest.mark.parametrize("token_id", [2**24, 2**31, 2**32 - 1])
def test_token_ids_past_any_vocabulary(folder: Path, token_id: int) -> None:
    set_field("tokenizer.json", ("model", "vocab", "q"), token_id, folder)
    with pytest.raises(ModelError, match="token ids of 16,777,216 and more"):
        tokenizer_of(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"1": "a"}),
        ("added_tokens_decoder", {"1": {"content": 1}}),
        ("additional_special_tokens", 7),
        ("additional_special_tokens", [{"text": "a"}]),
        ("bos_token", {}),
        ("chat_template", {"default": "x"}),
        ("chat_template", 5),
    ],
)
def test_a_tokenizer_config_of_other_types(folder: Path, field: str, value: Any) -> None:
    set_field("tokenizer_config.json", (field,), value, folder)
    with pytest.raises(ModelError, match=field):
        tokenizer_of(folder)


def test_a_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not in UTF-8"):
        tokenizer_of(folder)


def test_pieces_that_would_take_quadratic_time() -> None:
    fields = {"model": "llama", "tokens": ["a" * 10**5], "scores": [0.0], "token_type": [1]}
    with pytest.raises(ModelError, match="too long"):
        Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})


# --- chat templates -----------------------------------------------------------------------------

BOMBS = {
    "indent": ("{{ messages | tojson(indent=10**9) }}", "memory"),
    "multiplied": ("{{ 'a' * 10**10 }}", "memory"),
    "formatted": ("{{ '%10000000000d' % 1 }}", "memory|large|big"),
    "by a method": ("{{ 'a'.center(10**10) }}", "memory"),
    "by a filter": ("{{ 'a' | center(10**10) }}", "memory"),
    "replaced": ("{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}", "memory"),
    "joined": ("{{ range(99999) | join('a' * 10**6) }}", "memory"),
    "doubled": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "memory",
    ),
    "much text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    "nested": ("{{" + "(" * 9999 + ")" * 9999 + "}}", "recursion"),
}
ENDLESS = {
    "a power": "{{ 9 ** (10 ** 9) }}",
    "loops in loops": (
        "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_wants_too_much(name: str) -> None:
    template, reason = BOMBS[name]
    with pytest.raises(RequestError, match=f"refuses this conversation .*({reason})"):
        render(template, USER)
    assert render("{{ messages[0].content }}", USER) == "Hi"


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end(name: str) -> None:
    process = TemplateProcess(most_seconds=0.5)
    with pytest.raises(RequestError, match=r"takes more than 0\.5 seconds"):
        render(ENDLESS[name], USER, process=process)
    assert render("{{ messages[0].content }}", USER, process=process) == "Hi"


def test_looking_for_tools_runs_nothing_of_a_template() -> None:
    """jinja2 computes constants when it compiles."""
    assert takes_tools("{{ 'a' | center(10**11) }}{{ tools }}")
    assert not takes_tools("{{ 'a' | center(10**11) }}")
    assert not takes_tools("{{" + "(" * 9999)
    assert not takes_tools("{{ tools }}" + "x" * (2 << 20))


def test_a_template_of_megabytes() -> None:
    with pytest.raises(RequestError, match="more than 1,048,576 characters"):
        render("x" * (2 << 20), USER)


def test_what_a_template_is_given_is_plain_data() -> None:
    with pytest.raises(RequestError, match="plain data"):
        render("{{ x }}", USER, variables={"x": object()})
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(RequestError, match="plain data"):
        render("{{ x }}", USER, variables={"x": deep})


class TestTemplateProcess:
    def test_many_threads_share_it(self) -> None:
        process, found = TemplateProcess(), {}

        def ask(i: int) -> None:
            for k in range(20):
                found[i, k] = process.render("{{ x }}", {"x": f"{i}-{k}" * 9999})

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {(i, k): {"text": f"{i}-{k}" * 9999} for i in range(8) for k in range(20)}

    def test_it_is_started_again_if_it_was_killed(self) -> None:
        process = TemplateProcess()
        assert process.render("{{ 1 }}", {}) == {"text": "1"}
        assert process._child is not None
        os.kill(process._child.pid, signal.SIGKILL)
        process._child.wait()
        assert process.render("{{ 2 }}", {}) == {"text": "2"}

    def test_a_fork_gets_its_own(self) -> None:
        chat_template.render("{{ 1 }}", USER)
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, chat_template.render("{{ 'child' }}", USER).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 100) == b"child"
        assert chat_template.render("{{ 'parent' }}", USER) == "parent"

    def test_it_ends_with_its_parent(self, tmp_path: Path) -> None:
        """However that ends, and without a word on a Ctrl-C that is meant for the parent."""
        program = (
            "from quire.models.text import chat_template as c; import os, signal;"
            "c.render('x', [{'role': 'user', 'content': 'x'}]);"
            "pid = c.PROCESS._child.pid; os.kill(pid, signal.SIGINT);"
            "c.render('x', [{'role': 'user', 'content': 'x'}]);"
            "assert c.PROCESS._child.pid == pid; print(pid, flush=True);"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        parent = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert parent.stderr == "", parent.stderr
        entry = Path(f"/proc/{int(parent.stdout)}")
        deadline = time.monotonic() + PATIENCE_S
        while entry.exists() and "Z" not in (entry / "stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_modules_in_the_current_folder_are_not_imported(self, tmp_path: Path) -> None:
        """Which may be the model's."""
        for name in ("json", "jinja2", "quire"):
            (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
        program = (
            f"import sys; sys.path[:] = {[p for p in sys.path if p]!r};"
            "from quire.models.text.chat_template import render;"
            "print(render('{{ 1 }}', [{'role': 'user', 'content': 'x'}]))"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout, (tmp_path / "ran").exists()) == ("1\n", False), done.stderr


# --- the command line ---------------------------------------------------------------------------


def test_the_command_line_says_one_line(folder: Path) -> None:
    set_field("config.json", ("num_hidden_layers",), 2**31, folder)
    done = subprocess.run(
        [sys.executable, "-m", "quire", "generate", str(folder), "--prompt", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: The model's config has num_hidden_layers=2147483648")
    assert done.stderr.count("\n") == 1
