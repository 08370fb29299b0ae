"""Adapters over HTTP: served by name, loaded and unloaded while others are answered."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from tiny_adapters import write_adapter
from tiny_model import CONFIG

KEY = {"Authorization": "Bearer sk-one"}
PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again and again."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters may be loaded from, with three of them."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(["a", "b", "c"]):
        write_adapter(folder / name, seed, model=CONFIG)
    return folder


@pytest.fixture(scope="module")
def server(tiny: str, folder: Path) -> Iterator[ServerProcess]:
    keys = folder.parent / "keys.txt"
    keys.write_text("sk-one\nsk-two\n")
    modules = [f"a={folder / 'a'}", json.dumps({"name": "b", "path": str(folder / "b")})]
    flags = ["--max-loras", "1", "--api-keys-file", str(keys), "--lora-folder", str(folder)]
    server = ServerProcess.tiny(tiny, "--lora-modules", *modules, *flags)
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.http() as client:
        client.headers.update(KEY)
        yield client


def complete(http: httpx.Client, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **more}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(http: httpx.Client, model: str, **more: Any) -> str:
    return str(complete(http, model, **more)["choices"][0]["text"])


def cached(http: httpx.Client, model: str) -> int:
    return int(complete(http, model)["usage"]["prompt_tokens_details"]["cached_tokens"])


def load(http: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return http.post("/v1/load_lora_adapter", json=body)


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def names(http: httpx.Client) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_adapters_are_models_with_a_parent(http: httpx.Client, folder: Path) -> None:
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert list(models) == ["tiny", "a", "b"]
    assert models["tiny"]["parent"] is None
    assert models["a"]["parent"] == "tiny" and models["a"]["root"] == str(folder / "a")
    assert http.get("/v1/models/b").json() == models["b"]


def test_the_model_field_chooses_on_every_route(http: httpx.Client) -> None:
    answers = {name: complete(http, name) for name in ("tiny", "a", "b")}
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 3
    assert [answer["model"] for answer in answers.values()] == ["tiny", "a", "b"]
    again = {name: complete(http, name) for name in answers}
    for name, answer in again.items():
        assert answer["choices"] == answers[name]["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    chats = []
    for name in answers:
        body = {"model": name, "messages": [{"role": "user", "content": PROMPT}]}
        body |= {"temperature": 0, "max_tokens": 8}
        chats.append(http.post("/v1/chat/completions", json=body).json())
    assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 3
    responses = []
    for name in answers:
        body = {"model": name, "input": PROMPT, "temperature": 0, "max_output_tokens": 16}
        responses.append(http.post("/v1/responses", json=body).json())
    assert len({json.dumps(each["output"][0]["content"]) for each in responses}) == 3
    messages = []
    for name in answers:
        body = {"model": name, "messages": [{"role": "user", "content": PROMPT}]}
        body |= {"temperature": 0, "max_tokens": 8}
        messages.append(http.post("/v1/messages", json=body).json())
    assert len({json.dumps(each["content"]) for each in messages}) == 3
    ids = http.post("/tokenize", json={"model": "a", "prompt": PROMPT}).json()["tokens"]
    body = {"model": "a", "tokens": ids}
    assert http.post("/detokenize", json=body).json()["prompt"] == PROMPT


def test_an_unknown_name_is_a_404_that_says_what_there_is(http: httpx.Client) -> None:
    for route, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
    ]:
        response = http.post(route, json={"model": "nobody", **body})
        assert "there is tiny, a, b" in error(response, 404)
        assert response.json()["error"]["code"] == "model_not_found"


def test_a_prefix_of_an_adapter_is_deleted_alone(http: httpx.Client) -> None:
    for name in ("tiny", "a"):
        complete(http, name)
    response = http.post("/v1/cache/delete", json={"model": "a", "prompt": PROMPT})
    assert response.json()["blocks"]["device"] > 0
    assert cached(http, "a") == 0 and cached(http, "tiny") > 0


def test_loaded_served_reloaded_and_unloaded(http: httpx.Client, folder: Path) -> None:
    path = folder / "changing"
    shutil.copytree(folder / "c", path)
    assert load(http, "new", "changing").text.startswith("Success")
    assert names(http) == ["tiny", "a", "b", "new"]
    first = text(http, "new")
    assert cached(http, "new") > 0
    write_adapter(path, seed=77, model=CONFIG)
    assert text(http, "new") == first  # as it was loaded
    assert "loaded already" in error(load(http, "new", "changing"), 400)
    assert load(http, "new", str(path), load_inplace=True).status_code == 200
    assert cached(http, "new") == 0  # other weights find nothing old
    assert text(http, "new") != first
    assert load(http, "same as c", "c").status_code == 200
    assert text(http, "same as c") == first
    assert cached(http, "same as c") > 0  # contents, not names
    for name in ("new", "same as c"):
        assert unload(http, name).status_code == 200
        error(http.post("/v1/completions", json={"model": name, "prompt": "x"}), 404)
        assert "No adapter" in error(unload(http, name), 404)
    assert names(http) == ["tiny", "a", "b"]


def test_requests_that_run_outlive_their_adapters_name(http: httpx.Client) -> None:
    assert load(http, "short", "c").status_code == 200
    wanted = text(http, "short", max_tokens=300, ignore_eos=True)
    body = {"model": "short", "prompt": PROMPT, "temperature": 0, "max_tokens": 300}
    body |= {"stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        events = [next(lines)]
        assert unload(http, "short").status_code == 200
        assert "short" not in names(http)
        events += lines
    told = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in told) == wanted


def test_many_load_and_unload_at_once(http: httpx.Client, server: ServerProcess) -> None:
    """One of those that want the same name gets it."""
    statuses: list[int] = []

    def one() -> None:
        with server.http() as client:
            client.headers.update(KEY)
            statuses.append(load(client, "wanted", "c").status_code)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [400] * 7
    assert unload(http, "wanted").status_code == 200


def test_paths_lead_nowhere_but_below_the_folder(http: httpx.Client, folder: Path) -> None:
    outside = write_adapter(folder.parent / "outside", seed=5, model=CONFIG)
    (folder / "link").symlink_to(outside)
    (folder / "inner link").symlink_to(folder / "c")
    partly = folder / "partly"
    shutil.copytree(folder / "c", partly)
    (partly / "adapter_model.safetensors").unlink()
    (partly / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    beside = Path(f"{folder}-beside")
    shutil.copytree(outside, beside)
    ways = ["../outside", str(outside), "link", "a/../../outside", "partly", ".", "/", "", "~"]
    for way in [*ways, "a/..", str(beside), f"../{beside.name}"]:
        response = load(http, "bad", way)
        assert response.status_code in (403, 404), (way, response.text)
        assert str(outside) not in response.text
    for way in ("nothing", "a/adapter_config.json"):
        assert "no folder" in error(load(http, "bad", way), 404)
    for way in ("a\0b", "x" * 5000):
        assert load(http, "bad", way).status_code in (400, 404)
    assert load(http, "good", "inner link").status_code == 200
    assert unload(http, "good").status_code == 200
    assert names(http) == ["tiny", "a", "b"]


def test_what_cannot_be_loaded_is_said(http: httpx.Client, folder: Path) -> None:
    write_adapter(folder / "large", seed=1, rank=64, model=CONFIG)
    assert "64" in error(load(http, "large", "large"), 400)
    (folder / "empty").mkdir()
    error(load(http, "empty", "empty"), 400)
    assert "base model" in error(load(http, "tiny", "c"), 400)
    for name in ("", "x" * 500, "a\nb"):
        error(load(http, name, "c"), 400)
    error(http.post("/v1/load_lora_adapter", json={"lora_name": "x"}), 400)
    assert names(http) == ["tiny", "a", "b"]


def test_a_key_is_needed(server: ServerProcess) -> None:
    with server.http() as client:
        for key in ({}, {"Authorization": "Bearer sk-no"}):
            client.headers.update(key)
            error(load(client, "x", "c"), 401)
            error(unload(client, "a"), 401)


def test_a_server_without_a_folder_loads_nothing(strict: ServerProcess) -> None:
    with strict.http() as client:
        client.headers.update(KEY)
        assert "--lora-folder" in error(load(client, "x", "/"), 403)
        assert "--lora-folder" in error(unload(client, "x"), 403)


def test_requests_are_counted_and_shown_by_adapter(
    http: httpx.Client, server: ServerProcess
) -> None:
    complete(http, "a")
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    of_a = {each.name: each.value for each in samples if each.labels.get("adapter") == "a"}
    assert of_a["quire_adapter_requests_total"] >= 1
    assert of_a["quire_adapter_generation_tokens_total"] >= 8
    [info] = [each for each in samples if each.name == "vllm:lora_requests_info"]
    assert info.labels["max_lora"] == "1" and info.labels["running_lora_adapters"] == ""
    stories = http.get("/page/data/journal").json()["requests"]
    assert "a" in {story["adapter"] for story in stories}
    assert '"adapter":"a"' in server.log


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora-folder", "."], "--api-keys-file"),
        (["--lora-modules", "nothing"], "name=path"),
        (["--lora-modules", "x=1", "x=2"], "twice"),
        (["--lora-modules", "{no json"], "name=path"),
    ],
)
def test_wrong_settings_are_found_at_once(tiny: str, flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", tiny, "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and says in ended.stderr and "Traceback" not in ended.stderr


def test_a_module_that_cannot_be_read_ends_the_server(tiny: str, tmp_path: Path) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--num-blocks", "64"]
    modules = ["--lora-modules", f"x={tmp_path / 'nothing'}"]
    command = [sys.executable, "-m", "quire", "serve", tiny, "--port", "0", *flags, *modules]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and str(tmp_path / "nothing") in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_every_replica_reads_what_it_is_sent(tiny: str, folder: Path) -> None:
    flags = ["--replicas", "2", "--routing", "round_robin", "--lora-modules", f"a={folder / 'a'}"]
    server = ServerProcess.tiny(tiny, *flags)
    with server.http() as http:
        texts = {text(http, "a", prompt=f"{PROMPT} {i % 2}") for i in range(8)}
        assert len(texts) == 2
        held = [
            sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
            if sample.name == "quire_adapters_in_slots"
        ]
        assert held == [1.0, 1.0]
    assert server.stop() == 0, server.log
