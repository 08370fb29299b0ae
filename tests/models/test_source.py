"""Finding a model by name, and one sentence for each way in which that can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelError
from quire.models.checkpoints import demo, hub
from quire.models.checkpoints.dummy import DummySource, Noise, drawn
from quire.models.checkpoints.folder import read_tokenizer
from quire.models.checkpoints.git_lfs import POINTER
from quire.models.checkpoints.safetensors import FolderSource
from quire.models.hf_config import read_hf_config
from quire.models.source import build_model, find, open_model, read_whole

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole little model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(RAW))
    tensors = DummySource(read_hf_config(RAW)).tensors()
    save_file(dict(tensors), path / "model.safetensors")
    return path


def refusal(name: object, load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as error:
        open_model(str(name), load_format, progress=False)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_folder(folder: Path) -> None:
    source = open_model(str(folder))
    assert isinstance(source, FolderSource)
    assert source.tokenizer() is None
    build_model(source, torch.float32, torch.device("cpu"), progress=False)


def test_generation_config_may_add_ends_of_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert open_model(str(folder)).config.eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text("{}")
    assert open_model(str(folder)).config.eos_token_ids == (2,)


def test_progress_is_shown_on_a_terminal_only_if_asked_for(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cpu = open_model(str(folder)), torch.device("cpu")
    build_model(source, torch.float32, cpu, progress=False)
    assert capfd.readouterr() == ("", "")
    build_model(source, torch.float32, cpu, progress=True)
    assert capfd.readouterr() == ("", "")  # a file would keep every state of a bar
    monkeypatch.setattr("quire.models.checkpoints.weights.draws_bars", lambda: True)
    build_model(source, torch.float32, cpu, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "loading" in err


def test_fingerprint_follows_weights_and_config_but_not_the_path(folder: Path) -> None:
    def fingerprint(path: Path) -> str:
        return open_model(str(path)).fingerprint.result()

    first = fingerprint(folder)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint(copy) == first

    tensors = read_whole(FolderSource(folder))
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.001
    save_file(tensors, copy / "model.safetensors")
    changed_weights = fingerprint(copy)
    (copy / "config.json").write_text(json.dumps({**RAW, "rope_theta": 2e4}))
    assert len({first, changed_weights, fingerprint(copy)}) == 3


def test_dummy_fingerprint_follows_the_config() -> None:
    def fingerprint(name: str) -> str:
        return open_model(name, "dummy").fingerprint.result()

    assert fingerprint("qwen3-0.6b") == fingerprint("qwen3-0.6b") != fingerprint("qwen3-8b")


def test_dummy_weights_differ_from_those_of_the_same_config(folder: Path) -> None:
    names = {open_model(str(folder), how).fingerprint.result() for how in ("auto", "dummy")}
    assert len(names) == 2


def test_dummy_weights_are_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one fingerprint, so a GPU must not draw numbers of its own."""
    drawn_on = []

    def randn(*shape: int, generator: torch.Generator, device: str) -> torch.Tensor:
        drawn_on.append((generator.device.type, torch.device(device).type))
        return torch.zeros(*shape)

    assert Noise(torch.device("meta")).numbers.device.type == "meta"
    monkeypatch.setattr(torch, "randn", randn)
    drawn.__wrapped__(3)  # what is drawn is kept
    assert drawn_on == [("cpu", "cpu")]


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19)])
def test_built_in_shapes(name: str, billions: float) -> None:
    from quire.models.registry import family

    source = open_model(name, "dummy")
    assert source.tokenizer() is None
    assert source.config.dtype == "bfloat16"
    assert source.config.max_position_embeddings == 40_960
    with torch.device("meta"):
        model = family(source.config.architecture)(source.config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_shape_has_no_weights_to_load() -> None:
    assert "load_format=dummy" in refusal("qwen3-8b")


def test_dummy_needs_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = open_model(str(folder), "dummy")
    assert isinstance(source, DummySource) and source.config.vocab_size == 50
    assert source.tokenizer() is None


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tokenizer_beside_the_config_is_read(folder: Path, load_format: str) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    tokenizer = open_model(str(folder), load_format).tokenizer()
    assert tokenizer is not None and tokenizer.encode("a") == [0]


def test_the_demo_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch", lambda progress: Path(f"fetched-{progress}"))
    assert find("smollm2", weights=True, progress=False) == Path("fetched-False")


def test_names_that_are_nothing() -> None:
    assert "did you mean smollm2?" in refusal("smolm2")
    assert "did you mean qwen3-0.6b?" in refusal("Qwen3-0.6B")
    message = refusal("/no/such/folder")
    assert "did you mean" not in message
    assert "Hugging Face folder" in message and ".gguf" in message and "Qwen/Qwen3-0.6B" in message


def test_a_file_that_is_no_model(folder: Path) -> None:
    assert "neither a .gguf file nor a folder" in refusal(folder / "config.json")
    fake = folder / "fake.gguf"
    fake.write_bytes(b"not a model")
    assert "GGUF" in refusal(fake)


def test_folders_that_are_no_models(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty)
    (empty / "x.gguf").touch()
    assert "x.gguf" in refusal(empty)
    for content in ("{", "[1]", "\xff\xfe"):
        (folder / "config.json").write_text(content, encoding="latin-1")
        assert "config.json" in refusal(folder)
    assert "config.json" in refusal(folder, "dummy")


def test_folders_without_weights_of_use(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    message = refusal(folder)
    assert "pickled" in message and "save_pretrained" in message


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is not a whole safetensors file" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "x.gguf"])
def test_a_pointer_of_git_lfs(folder: Path, name: str) -> None:
    lines = POINTER + b".github.com/spec/v1\noid sha256:4d7a\nsize 3456\n"
    (folder / name).write_bytes(lines)
    message = refusal(folder / name if name.endswith("gguf") else folder)
    assert f"{name} is a pointer of Git LFS" in message and "git lfs pull" in message


def test_a_tokenizer_that_is_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(POINTER + b".github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json is a pointer of Git LFS"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"a":1}', b'{"a":{"data_offsets":[0]}}', b"\xff\xff", b"{" * 9]
)
def test_a_file_that_is_something_else(folder: Path, header: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "not a whole safetensors file" in refusal(folder)


def test_an_index_without_its_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "model-1.safetensors" in refusal(folder)
    index.write_text("{}")
    assert "names no files" in refusal(folder)


def test_weights_of_another_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**RAW, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\..*: download both"):
        build_model(open_model(str(folder)), torch.float32, torch.device("cpu"), progress=False)


class TestHub:
    """Without a network: the library's own function is put aside."""

    @pytest.fixture
    def calls(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def download(name: str, **options: Any) -> str:
            calls.append({"name": name, **options})
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return calls

    def test_a_repository_is_fetched_without_what_is_not_needed(
        self, calls: list[dict[str, Any]]
    ) -> None:
        assert isinstance(open_model("org/some-model", progress=False), FolderSource)
        assert calls[0]["name"] == "org/some-model"
        assert "*.safetensors" in calls[0]["allow_patterns"]
        assert not any("bin" in pattern for pattern in calls[0]["allow_patterns"])

    def test_dummy_weights_spare_the_download(self, calls: list[dict[str, Any]]) -> None:
        assert isinstance(open_model("org/some-model", "dummy", progress=False), DummySource)
        assert "*.safetensors" not in calls[0]["allow_patterns"]

    def test_a_folder_goes_first(
        self, calls: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder.parent.parent)
        open_model(f"{folder.parent.name}/{folder.name}")
        assert not calls

    @pytest.mark.parametrize(
        "error", [ConnectionError("no route\nto host."), OSError("disk full"), RuntimeError()]
    )
    def test_any_failure_is_one_sentence(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        message = refusal("org/some-model")
        assert "org/some-model" in message and hub.reason(error) in message

    def test_gated_and_missing_repositories(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        for kind, words in ((GatedRepoError, "ask for access"), (RepositoryNotFoundError, "spell")):
            error = kind.__new__(kind)

            def fail(*_: Any, error: Exception = error, **__: Any) -> str:
                raise error

            monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
            assert words in refusal("org/some-model")


def test_longrope_is_chosen_by_the_longest_text(tmp_path: Path) -> None:
    """Where all texts are short, the short frequencies, which those were trained with."""
    rope = {"type": "longrope", "short_factor": [1] * 4, "long_factor": [4] * 4}
    raw = {**RAW, "architectures": ["Phi3ForCausalLM"], "rope_scaling": rope}
    raw |= {"max_position_embeddings": 256, "original_max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for max_len, divisor in ((None, 4.0), (129, 4.0), (128, 1.0)):
        config = open_model(str(tmp_path), "dummy", max_len=max_len).config
        assert config.rope.divisors == (divisor,) * 4
