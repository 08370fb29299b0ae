"""The names of blocks depend on all that their bytes depend on, and on nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXPERTS, LATENT
from patience import PATIENCE_S
from tiny_llm import CONFIG, write_config
from tiny_ranks import SHAPE, open_ranks, write_weights

from quire.config import EngineConfig
from quire.engine.build import build_engine
from quire.engine.build_store import block_namespace
from quire.kv.keys import Namespace
from quire.layers.tp import TensorParallel
from quire.models.checkpoints import digest
from quire.models.checkpoints.digest import Fingerprint
from quire.models.source import open_model
from quire.ranks import rank_model
from quire.ranks.rank_model import RankModel

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
TIER = {"host_cache_bytes": "4MiB", "num_blocks": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "model")


def namespace(folder: Path, **settings: Any) -> Namespace:
    """As an engine of these settings works it out."""
    basics = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    config = EngineConfig.create(**basics | settings)
    source = open_model(config.model, config.load_format, quantization=config.quantization)
    ranks = config.tensor_parallel_size
    part = RankModel(config, source, TensorParallel(0, ranks), torch.device("cpu"))
    experts = config.enable_expert_parallel
    bits = config.activation_bits
    return block_namespace(source, part.dtype, part.layout, ranks, experts, bits)


def root(folder: Path, **settings: Any) -> bytes:
    return namespace(folder, **settings).root_key()


# --- what changes the names ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"load_format": "dummy"},
        {"quantization": "fp8"},
        {"quantization": "int4"},
    ],
)
def test_a_setting_that_changes_kv_changes_them(folder: Path, setting: dict[str, Any]) -> None:
    assert root(folder, **setting) != root(folder)


def test_so_do_activations_of_eight_bits(folder: Path) -> None:
    int8 = {"quantization": "int8"}
    assert root(folder, **int8, activation_bits=8) != root(folder, **int8)
    assert root(folder, **int8, activation_bits=16) == root(folder, **int8)


def test_the_grouping_of_layers_is_part_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of a group have the layers of that group."""
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    shape = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 6}
    folder = write_weights(tmp_path / "model", **shape, **windows)
    grouped = namespace(folder, **TIER)
    assert grouped.layout.count("window 64") == 2 and "layers 0,1 " in grouped.layout
    monkeypatch.setattr(rank_model, "WINDOW_GROUPS", False)
    assert namespace(folder, **TIER).root_key() != grouped.root_key()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 20_000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"factor": 4.0}},
        {"rope_scaling": YARN | {"beta_fast": 16.0}},
        {"rope_scaling": YARN | {"attention_factor": 1.5}},
        {"num_attention_heads": 4},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"num_hidden_layers": 2},
    ],
    ids=str,
)
def test_a_config_of_another_model_changes_them(
    folder: Path, load_format: str, change: dict[str, Any]
) -> None:
    before = root(folder, load_format=load_format)
    (folder / "config.json").write_text(json.dumps(CONFIG | SHAPE | change))
    assert root(folder, load_format=load_format) != before


LATENT_MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    **LATENT,
    "num_key_value_heads": 8,
}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, **EXPERTS}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("shape", [LATENT_MODEL, MIXTURE], ids=["latents", "experts"])
def test_ranks_that_round_their_own_parts_do(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Of rows that are cut each part has its own scale: another cut is another model."""
    write_config(tmp_path, **SHAPE | shape)
    layouts = [{}, TWO_RANKS, TWO_RANKS | {"enable_expert_parallel": True}]
    for quantization in ("fp8", "int8", "int4"):
        settings = {"load_format": "dummy", "quantization": quantization}
        assert len({root(tmp_path, **settings, **layout) for layout in layouts}) == 3


def test_ranks_of_numbers_share_latents(tmp_path: Path) -> None:
    """Each rank has the same ones, and what it adds to them is not rounded."""
    write_config(tmp_path, **SHAPE | LATENT_MODEL)
    assert root(tmp_path, load_format="dummy") == root(tmp_path, load_format="dummy", **TWO_RANKS)


def test_no_two_of_these_models_share_a_name(folder: Path) -> None:
    roots = set()
    changes: list[dict[str, Any]] = [{}, {"rope_scaling": YARN}, {"sliding_window": 64}]
    for family in ("LlamaForCausalLM", "MistralForCausalLM"):
        for change in changes:
            raw = CONFIG | SHAPE | change | {"architectures": [family]}
            (folder / "config.json").write_text(json.dumps(raw))
            roots |= {root(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}
    assert len(roots) == 2 * len(changes) * 2


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_quantization_has_names_of_its_own(folder: Path, load_format: str) -> None:
    made = ("fp8", "int8", "int4", None)
    roots = {root(folder, load_format=load_format, quantization=each) for each in made}
    assert len(roots) == len(made)


def test_any_byte_of_the_weights_changes_them(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    roots = {root(folder)}
    places = [*range(len(whole) // 8, len(whole), len(whole) // 8), len(whole) - 1]
    for at in places:
        weights.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        roots.add(root(folder))
    assert len(roots) == 1 + len(places)


def test_tenants_and_adapters_change_them(folder: Path) -> None:
    plain = namespace(folder)
    adapted = Namespace(**{**plain.__dict__, "adapter": "lora"})
    assert len({plain.root_key(), plain.root_of("tenant"), adapted.root_key()}) == 3


# --- what does not ------------------------------------------------------------------------------


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    "change",
    [
        write("tokenizer_config.json", "{}"),
        write("generation_config.json", '{"eos_token_id": 7}'),
        write("chat_template.jinja", "{{ messages }}"),
        write("README.md", "hello"),
        lambda folder: (folder / "model.safetensors").touch(),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["tokenizer", "generation", "template", "readme", "touched", "renamed"],
)
def test_what_kv_does_not_depend_on_leaves_them_alone(
    folder: Path, change: Callable[[Path], object]
) -> None:
    before = root(folder)
    change(folder)
    assert root(folder) == before


def test_settings_that_kv_does_not_depend_on_leave_them_alone(folder: Path) -> None:
    same = {
        "max_model_len": 64,
        "num_blocks": 9,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 128,
        "seed": 5,
        "speculative": "ngram",
        "scheduling_policy": "priority",
        "tenant_cache_share": 0.5,
        "enforce_eager": True,
    }
    assert root(folder, **same) == root(folder)


# --- the engine asks for it only if it has to ---------------------------------------------------


@pytest.fixture
def never_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "hash_leaves", lambda *_: pytest.fail("it was hashed"))


@pytest.mark.usefixtures("never_hashed")
def test_nothing_is_hashed_where_no_block_needs_a_name(folder: Path) -> None:
    with open_ranks(folder, 1, num_blocks=16) as llm:
        assert llm.engine.observed.namespace is None


@pytest.mark.usefixtures("never_hashed")
def test_dummy_weights_have_nothing_to_hash(folder: Path) -> None:
    with open_ranks(folder, 1, load_format="dummy", **TIER) as llm:
        assert llm.engine.observed.namespace == namespace(folder, load_format="dummy", block_size=8)
        assert "digest" not in llm.engine.observed.startup.seconds


def test_an_engine_that_tells_its_blocks_names_them(folder: Path) -> None:
    settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "num_blocks": 16}
    engine = build_engine(EngineConfig(**settings), progress=False, publishes_events=True)
    engine.publish_events()
    assert engine.observed.namespace == namespace(folder)
    engine.close()


def test_the_fingerprint_does_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    found = []
    for size in (1, 2):
        with open_ranks(folder, size, **TIER) as llm:
            assert llm.engine.observed.namespace is not None
            found.append(llm.engine.observed.namespace)
    assert found[0].model == found[1].model == open_model(str(folder)).fingerprint.result()
    assert found[0].root_key() != found[1].root_key()


def test_tiers_wait_for_it_and_the_start_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_leaves, result = digest.hash_leaves, Fingerprint.result
    is_awaited = threading.Event()

    def hash_late(path: Path, start: int) -> list[bytes]:
        assert is_awaited.wait(PATIENCE_S)
        return hash_leaves(path, start)

    def await_it(self: Fingerprint) -> str:
        is_awaited.set()
        return result(self)

    monkeypatch.setattr(digest, "hash_leaves", hash_late)
    monkeypatch.setattr(Fingerprint, "result", await_it)
    with open_ranks(folder, 1, **TIER) as llm:
        phases = list(llm.engine.observed.startup.seconds)
        assert phases.index("weights") < phases.index("digest") < phases.index("tiers")
        assert ", digest " in str(llm.engine.observed.startup)


def test_a_start_that_fails_leaves_no_thread_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints: list[Fingerprint] = []
    begin = Fingerprint.begin
    monkeypatch.setattr(Fingerprint, "begin", lambda self: (fingerprints.append(self), begin(self)))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RankModel, "load", fail)
    with pytest.raises(KeyboardInterrupt):
        open_ranks(folder, 1, **TIER)
    [fingerprint] = fingerprints
    assert fingerprint._pool is not None
    with pytest.raises(RuntimeError, match="after shutdown"):
        fingerprint._pool.submit(print)


def test_what_a_model_was_stored_under_stays(folder: Path) -> None:
    """These texts are part of keys on disks: a new field of a config may not change them."""
    (folder / "config.json").write_text(json.dumps(CONFIG | SHAPE))
    found = namespace(folder)
    assert found.rope == (
        "RopeConfig(theta=10000.0, kind='default', factor=1.0, original_positions=0, "
        "low_freq_factor=1.0, high_freq_factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=True, "
        "attention_factor=1.0, divisors=())"
    )
    shape = CONFIG | SHAPE
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    assert found.layout == f"{shape['num_hidden_layers']}x2x2x{head_dim} tp 1"
