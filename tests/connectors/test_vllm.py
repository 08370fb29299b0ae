"""Quire's tiers under a real vLLM: `make test-vllm`. Its tokens are those that it has without them.

Each vLLM is a process. One has its scheduler and its worker in processes of their own, as when it
is served; the others have all in one, which starts sooner.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis_server import RedisServer
from safetensors.torch import save_file
from tcp_proxy import TcpProxy

from quire.kv.tiers.ssd.geometry import DATA_FILE
from quire.models.source import open_model, read_whole

PYTHON = os.environ.get("QUIRE_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-vllm installs a vLLM for these")

SESSION = Path(__file__).parent / "vllm_session.py"
PROMPTS = [[(7 * i * i + 3 * i + salt) % 49_000 + 5 for i in range(300)] for salt in range(2)]
FOUND = 288  # tokens of whole blocks of 32
LONG = [(11 * i * i + 5 * i) % 49_000 + 5 for i in range(3_000)]
NEW = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


class VLLM:
    """A session, and how it is asked."""

    def __init__(self, model: Path, extra: dict[str, Any] | None, processes: bool) -> None:
        read, write = os.pipe()
        assert PYTHON is not None
        command = [PYTHON, str(SESSION), str(model), json.dumps(extra), str(write)]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[write], text=True, env=environment
        )
        os.close(write)
        self._answers = os.fdopen(read)
        assert json.loads(self._answers.readline()) == "ready"

    def __getattr__(self, what: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            print(json.dumps([what, *arguments]), file=self._process.stdin, flush=True)
            return json.loads(self._answers.readline())

        return ask

    def close(self) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    folder.mkdir()
    tensors = read_whole(open_model("smollm2"))
    halves = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def windowed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a model with two KV groups: every second layer sees 64 tokens."""
    folder = tmp_path_factory.mktemp("models") / "windowed"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    types = ["sliding_attention", "full_attention"] * 15
    changes = {"layer_types": types, "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture
def open_vllm(model: Path) -> Iterator[Callable[..., VLLM]]:
    opened: list[VLLM] = []

    def open(extra: dict[str, Any] | None, processes: bool = False, folder: Path = model) -> VLLM:
        opened.append(VLLM(folder, extra, processes))
        return opened[-1]

    yield open
    for vllm in opened:
        vllm.close()


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Any]:
    """What vLLM says without the connector."""
    vllm = VLLM(model, None, processes=False)
    told = {"tokens": vllm.generate(PROMPTS, NEW)["tokens"]}
    told["long"] = vllm.generate([LONG], 1)
    vllm.close()
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An SSD tier, which several vLLMs open one after the other."""
    return {"ssd_cache_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_cache_bytes": "512MiB"}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def test_cold_and_from_host_memory(open_vllm, plain, folder, redis) -> None:
    url = f"redis://127.0.0.1:{redis.port}"
    tiers = {"host_cache_bytes": "512MiB", **folder, "remote_cache_url": url}
    vllm = open_vllm(tiers, processes=True)
    cold = vllm.generate(PROMPTS, NEW)
    assert cold["tokens"] == plain["tokens"]
    assert cold["cached"] == [0, 0]
    assert vllm.forget()
    warm = vllm.generate(PROMPTS, NEW)
    assert warm["tokens"] == plain["tokens"]
    assert warm["cached"] == [FOUND, FOUND]
    told = vllm.metrics()
    assert told["vllm:external_prefix_cache_hits"] == 2 * FOUND
    assert told["vllm:quire_loaded_blocks"] == 2 * FOUND / 32
    assert told["vllm:quire_failed_blocks"] == 0

    assert vllm.forget()
    other = vllm.generate(PROMPTS, NEW, "another tenant")
    assert other["tokens"] == plain["tokens"] and other["cached"] == [0, 0]

    assert vllm.generate([LONG], 1)["tokens"] == plain["long"]["tokens"]
    assert vllm.forget()
    warm = vllm.generate([LONG], 1)
    assert warm["tokens"] == plain["long"]["tokens"]
    assert warm["cached"] == [2_976]
    speedup = plain["long"]["seconds"] / warm["seconds"]
    print(f"3,000 tokens: cold {plain['long']['seconds']:.2f} s, warm {warm['seconds']:.2f} s")
    assert speedup >= 5


def test_from_a_disk_after_a_restart(open_vllm, plain, folder) -> None:
    vllm = open_vllm(folder)
    again = vllm.generate(PROMPTS, NEW)
    assert again["tokens"] == plain["tokens"]
    assert again["cached"] == [FOUND, FOUND]
    for steps in range(5):  # while it is looked up, loads, computes
        assert vllm.forget()
        vllm.abort(PROMPTS[0], steps)
    assert vllm.forget()
    assert vllm.generate(PROMPTS, NEW)["tokens"] == plain["tokens"]


def test_blocks_that_were_corrupted_on_a_disk(open_vllm, plain, folder) -> None:
    for file in Path(folder["ssd_cache_dir"]).rglob(DATA_FILE):
        size = file.stat().st_size
        with open(file, "r+b") as data:
            for at in range(100_000, size, 1 << 20):  # in every image
                data.seek(at)
                data.write(os.urandom(64))
    vllm = open_vllm(folder)
    again = vllm.generate(PROMPTS, NEW)
    assert again["tokens"] == plain["tokens"]
    assert vllm.metrics()["vllm:quire_failed_blocks"] > 0


def test_from_redis_by_a_second_vllm_until_it_is_killed(open_vllm, plain, redis) -> None:
    proxy = TcpProxy(redis.port)
    vllm = open_vllm({"remote_cache_url": f"redis://127.0.0.1:{proxy.port}"})
    again = vllm.generate(PROMPTS[:1], NEW)
    assert again["tokens"] == plain["tokens"][:1]
    assert again["cached"] == [FOUND]
    proxy.mode, proxy.cut_after = "cut", 4 << 20  # in the middle of the images
    again = vllm.generate(PROMPTS[1:], NEW)
    assert again["tokens"] == plain["tokens"][1:]
    redis.kill()
    assert vllm.forget()
    assert vllm.generate(PROMPTS, NEW)["tokens"] == plain["tokens"]
    proxy.vanish()


def test_a_model_with_windows(open_vllm, windowed: Path, tmp_path: Path) -> None:
    vllm = open_vllm(None, folder=windowed)
    wanted = vllm.generate(PROMPTS, NEW)["tokens"]
    vllm.close()
    folder = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "512MiB"}
    tiers = {"host_cache_bytes": "256MiB", **folder}
    vllm = open_vllm(tiers, folder=windowed)
    assert vllm.generate(PROMPTS, NEW)["tokens"] == wanted
    assert vllm.forget()
    warm = vllm.generate(PROMPTS, NEW)
    assert warm["tokens"] == wanted
    assert warm["cached"] == [FOUND, FOUND]
    vllm.close()
    vllm = open_vllm(tiers, folder=windowed)
    again = vllm.generate(PROMPTS, NEW)
    assert again["tokens"] == wanted
    assert again["cached"] == [FOUND, FOUND]
