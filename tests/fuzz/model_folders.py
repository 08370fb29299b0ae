"""Hostile model folders: a small whole model with one thing in it spoilt, opened as a user would.

Every field of every JSON file gets values of wrong types, sizes and depths, or is missing; so do
those of the safetensors header; files are empty, cut, or something else than files. Each folder is
opened with `LLM` and asked something, so that what was let through has to work as well.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.bounded import Case, Outcome, main, run_bounded

FULL, SMALL = 3_700, 80  # which are all there are, and some

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "truncate": True,
    },
    "rope_parameters": None,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 1,
    "layer_types": None,
    "eos_token_id": [2],
    "bos_token_id": 1,
    "dtype": "float32",
    "torch_dtype": "float32",
    "quantization_config": None,
    "auto_map": None,
}
# What quantised checkpoints say; their weights are made at random.
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head"],
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq_v2",
        "dynamic": None,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 16,
                    "actorder": None,
                },
            },
        },
        "ignore": ["re:.*lm_head"],
        "sparsity_config": None,
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*_proj"]},
}
TEMPLATE = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "additional_special_tokens": ["<t>"],
    "added_tokens_decoder": {"2": {"content": "</s>", "special": True, "normalized": False}},
    "chat_template": TEMPLATE,
}
JSON_FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG,
    "generation_config.json": {"eos_token_id": [2, 3]},
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "special_tokens_map.json": {"unk_token": "<unk>"},
}
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
MISSING = object()
NASTY: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "true": True,
    "0": 0,
    "-1": -1,
    "1": 1,
    "7": 7,
    "1.5": 1.5,
    "2**16": 2**16,
    "2**31": 2**31,
    "2**63": 2**63,
    "10**400": 10**400,
    "1e-300": 1e-300,
    "1e308": 1e308,
    "NaN": float("nan"),
    "inf": float("inf"),
    "empty string": "",
    "x": "x",
    "long string": "y\n" * 5000,
    "empty list": [],
    "list of strings": ["a", "b"],
    "list of lists": [[1], [2]],
    "empty object": {},
    "object": {"content": 1, "rope_type": [], "factor": "2"},
    "deep": DEEP,
}


def run(seed: int, count: int) -> Outcome:
    return run_bounded("fuzz.model_folders", seed, count)


def cases(good: Path, rng: random.Random, count: int) -> list[Case]:
    every = list(all_cases(good))
    return rng.sample(every, min(count, len(every)))


def all_cases(good: Path) -> Iterator[Case]:
    yield Case("nothing spoilt", partial(play, good, lambda folder: None))
    for name, spoil in spoilers(good):
        yield Case(name, partial(play, good, spoil))
    for key in CONFIG:
        for label, value in NASTY.items():
            spoil = partial(set_field, "config.json", (key,), value)
            yield Case(f"dummy {key}={label}", partial(play, good, spoil, load_format="dummy"))
    for name, method in QUANTIZED.items():
        for path in [(), *paths(method)]:
            for label, value in NASTY.items():
                spoilt = changed(method, path, value)
                spoil = partial(set_field, "config.json", ("quantization_config",), spoilt)
                how = partial(play, good, spoil, load_format="dummy")
                yield Case(f"{name} {'.'.join(path)}={label}", how)
    for label in ("deep", "2**31", "x", "empty object"):
        spoil = partial(set_field, "config.json", ("num_hidden_layers",), NASTY[label])
        yield Case(f"by the command line, num_hidden_layers={label}", partial(command, good, spoil))
        spoil = partial(set_header, ("model.norm.weight", "shape"), NASTY[label])
        yield Case(f"by the command line, shape={label}", partial(command, good, spoil))


Spoil = Callable[[Path], None]


def spoilers(good: Path) -> Iterator[tuple[str, Spoil]]:
    for file, content in JSON_FILES.items():
        for path in paths(content):
            for label, value in NASTY.items():
                yield f"{file} {'.'.join(path)}={label}", partial(set_field, file, path, value)
    header, _ = read_safetensors(good / "model.safetensors")
    entry = ("model.norm.weight",)
    places = [(), ("__metadata__",), entry, *((*entry, key) for key in header[entry[0]])]
    places += [(*entry, "shape", 0), (*entry, "data_offsets", 0), (*entry, "data_offsets", 1)]
    for place in places:
        for label, value in NASTY.items():
            yield f"header {place}={label}", partial(set_header, place, value)
    for length in (0, 1, 2, 2**20, 2**31, 2**63, 2**64 - 1):
        yield f"header of {length} bytes", partial(set_header_length, length)
    tokenizer = json.loads((good / "tokenizer.json").read_text())
    for path in paths(tokenizer):
        if path[:2] == ("model", "vocab") and path[2:] not in ((), ("ab",)):
            continue  # one token is as good as another
        for label, value in NASTY.items():
            spoil = partial(set_field, "tokenizer.json", path, value)
            yield f"tokenizer.json {'.'.join(path)}={label}", spoil
    for key, parts in TOKENIZER_PARTS.items():
        for label, value in parts.items():
            yield f"tokenizer {key}: {label}", partial(set_field, "tokenizer.json", (key,), value)
    for label, index in INDEXES.items():
        yield f"index {label}", partial(write, "model.safetensors.index.json", index)
    for label, template in TEMPLATES.items():
        yield f"template {label}", partial(write, "chat_template.jinja", template.encode())
    for file in (*JSON_FILES, "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        for label, make in FILES.items():
            yield f"{file} is {label}", partial(make, file)


TOKENIZER_PARTS: dict[str, dict[str, Any]] = {
    "padding": {
        "huge": {
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_to_multiple_of": 10**12,
            "pad_id": 2**31,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    },
    "truncation": {
        "to nothing": {
            "max_length": 0,
            "strategy": "LongestFirst",
            "direction": "Right",
            "stride": 2**31,
        }
    },
    "normalizer": {
        "bomb": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
                for _ in range(20)
            ],
        },
        "regex bomb": {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 4000},
        "long prefix": {"type": "Prepend", "prepend": "a" * 10**6},
        "precompiled": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    },
    "pre_tokenizer": {
        "exploding": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+b"},
            "behavior": "Isolated",
            "invert": False,
        },
        "no regex": {
            "type": "Split",
            "pattern": {"Regex": "("},
            "behavior": "Isolated",
            "invert": False,
        },
        "length 0": {"type": "FixedLength", "length": 0},
    },
    "post_processor": {
        "unknown token": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "no", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
        "many tokens": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "x", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {"x": {"id": "x", "ids": [2**31] * 1000, "tokens": ["x"] * 1000}},
        },
    },
    "decoder": {
        "bomb": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
                for _ in range(20)
            ],
        },
        "strip": {"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60},
    },
    "added_tokens": {
        label: [
            {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ]
        for label, number, content in [
            ("past the end", 2**31, "<x>"),
            ("below 0", -1, "<x>"),
            ("in another's place", 4, "<x>"),
            ("of no text", 40, ""),
            ("of every letter", 40, "a"),
            ("of much text", 40, "x" * 10**6),
        ]
    },
}
INDEXES = {
    "outside": b'{"weight_map": {"a": "../../../etc/passwd"}}',
    "absolute": b'{"weight_map": {"a": "/etc/passwd"}}',
    "its own folder": b'{"weight_map": {"a": "."}}',
    "above": b'{"weight_map": {"a": ".."}}',
    "numbers": b'{"weight_map": {"a": 1, "b": "model.safetensors"}}',
    "a list": b'{"weight_map": ["model.safetensors"]}',
    "lists": b'{"weight_map": {"a": ["model.safetensors"]}}',
    "a long name": json.dumps({"weight_map": {"a": "x" * 5000}}).encode(),
    "an odd name": b'{"weight_map": {"a": "\\u0000\\ud800"}}',
    "a file of another kind": b'{"weight_map": {"a": "config.json"}}',
    "missing files": json.dumps({"weight_map": {str(i): str(i) for i in range(9999)}}).encode(),
    "the file itself": b'{"weight_map": {"a": "model.safetensors"}}',
}
TEMPLATES = {
    "indents": "{{ messages | tojson(indent=10**9) }}",
    "multiplies": "{{ 'a' * 10**10 }}",
    "doubles": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "nests": "{{" + "(" * 5000 + ")" * 5000 + "}}",
    "is huge": "x" * (2 << 20),
    "breaks": "{% for %}",
    "looks around": "{{ ''.__class__.__mro__ }}",
}


def link_to_nothing(file: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("nowhere")


def cut(file: str, folder: Path) -> None:
    content = (folder / file).read_bytes() if (folder / file).exists() else b"{}"
    write(file, content[: len(content) // 2], folder)


def put_folder(file: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    (folder / file).mkdir()


def put_pipe(file: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)


def write(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)


FILES: dict[str, Callable[[str, Path], None]] = {
    "empty": lambda file, folder: write(file, b"", folder),
    "cut": cut,
    "not UTF-8": lambda file, folder: write(file, b"\xff\xfe{}", folder),
    "brackets": lambda file, folder: write(file, b"[" * 10**6, folder),
    "nested objects": lambda file, folder: write(file, b'{"a":' * 10**5, folder),
    "a list": lambda file, folder: write(file, b"[1]", folder),
    "a folder": put_folder,
    "a pipe": put_pipe,
    "a link to nothing": link_to_nothing,
    "not there": lambda file, folder: (folder / file).unlink(missing_ok=True),
}


def paths(content: Any) -> Iterator[tuple[str, ...]]:
    """The way to every field of an object, those of objects in it included."""
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            for rest in paths(value):
                yield (key, *rest)


def set_field(file: str, path: tuple[str, ...], value: Any, folder: Path) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(changed(content, path, value)))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return {} if value is MISSING else value
    *way, last = path
    content = copy.deepcopy(content)
    inner = content
    for key in way:
        inner = inner[key]
    if value is not MISSING:
        if isinstance(inner, dict):
            inner[last] = value
        else:
            inner[int(last)] = value
    elif isinstance(inner, dict):
        inner.pop(last, None)
    else:
        del inner[int(last)]
    return content


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def set_header(place: tuple[Any, ...], value: Any, folder: Path) -> None:
    header, data = read_safetensors(folder / "model.safetensors")
    text = json.dumps(changed(header, place, value)).encode()
    write("model.safetensors", len(text).to_bytes(8, "little") + text + data, folder)


def set_header_length(length: int, folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    write("model.safetensors", length.to_bytes(8, "little") + content[8:], folder)


def write_good(folder: Path) -> Path:
    """A whole model of forty tokens."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from quire.models.checkpoints.dummy import DummySource
    from quire.models.hf_config import read_hf_config

    folder.mkdir()
    for name, content in JSON_FILES.items():
        (folder / name).write_text(json.dumps(content))
    save_file(dict(DummySource(read_hf_config(CONFIG)).tensors()), folder / "model.safetensors")
    tokens = ["<unk>", "<s>", "</s>", "<t>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token) for token in tokens[:4]])
    backend.save(str(folder / "tokenizer.json"))
    return folder


SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_blocks": 8,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 2,
}


def play(good: Path, spoil: Spoil, folder: Path, load_format: str = "auto") -> None:
    from quire import LLM, SamplingParams

    shutil.copytree(good, folder, dirs_exist_ok=True)
    spoil(folder)
    params = SamplingParams(max_tokens=2)
    with LLM(str(folder), load_format=load_format, use_tqdm=False, **SETTINGS) as llm:
        answers = llm.generate([[5, 6, 7]], params)
        if llm.tokenizer is not None:
            answers += llm.generate(["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac"], params)
            if llm.tokenizer.chat_template is not None:
                answers += llm.chat([{"role": "user", "content": "ab"}], params)
        assert all(answer.error is None for answer in answers), answers


def command(good: Path, spoil: Spoil, folder: Path) -> None:
    """`quire generate FOLDER`: one line, and the status of a mistake that a user can mend."""
    from quire.api.cli import main as quire

    shutil.copytree(good, folder, dirs_exist_ok=True)
    spoil(folder)
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(io.StringIO()):
        status = quire(["generate", str(folder), "--prompt", "ab", "--num-blocks", "8"])
    lines = told.getvalue().splitlines()
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), (status, lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(partial(cases, write_good(Path(scratch) / "good")), Path(scratch))
