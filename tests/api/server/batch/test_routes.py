"""Files and batches over HTTP: OpenAI's client, other tenants, odd uploads, and a killed server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_files import BAD_LINES, request
from effort import effort
from patience import eventually
from server_process import ServerProcess
from tiny_model import write_tiny_model

ENDPOINT = "/v1/completions"
NAMES = {"json", "data"}


class BatchServer:
    """A server with keys and a folder, which may be killed and started again."""

    def __init__(self, model: str, folder: Path) -> None:
        (folder / "keys.txt").write_text("sk-one\nsk-two\n")
        self.folder = folder / "files"
        self._model = model
        self._flags = ["--api-keys-file", str(folder / "keys.txt")]
        self._flags += ["--batch-dir", str(self.folder), "--max-num-seqs", "4"]
        self._flags += ["--max-file-bytes", "2MB", "--max-files", "40", "--max-body-bytes", "100kB"]
        self.start()

    def start(self) -> None:
        self.process = ServerProcess.tiny(self._model, *self._flags)

    def kill(self) -> None:
        self.process.process.kill()
        self.process.process.wait()

    def client(self, key: str = "sk-one") -> openai.OpenAI:
        return self.process.openai(key)

    def http(self, key: str = "sk-one") -> httpx.Client:
        return self.process.http(headers={"Authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[BatchServer]:
    folder = tmp_path_factory.mktemp("batch")
    model = write_tiny_model(folder / "tiny", smollm2_path)
    server = BatchServer(str(model), folder)
    yield server
    assert server.process.stop() == 0, server.process.log
    assert "Traceback" not in server.process.log, server.process.log


def upload(client: openai.OpenAI, lines: list[str], name: str = "in.jsonl") -> str:
    data = "".join(f"{line}\n" for line in lines).encode()
    return client.files.create(file=(name, data), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[str], **more: Any) -> str:
    file_id = upload(client, lines)
    return client.batches.create(
        input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h", **more
    ).id


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    def look() -> openai.types.Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.completed_at or batch.cancelled_at or batch.failed_at else None

    return eventually(look)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def requests(count: int, **body: Any) -> list[str]:
    return [request(f"line-{i}", f"Number {i}", **body) for i in range(count)]


def test_openais_client_uploads_and_reads_results(server: BatchServer):
    client = server.client()
    lines = [*requests(20), *BAD_LINES]
    batch_id = begin(client, lines, metadata={"purpose": "test"})
    batch = ended(client, batch_id)
    assert batch.status == "completed" and batch.metadata == {"purpose": "test"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 20, "failed": 10}
    good = results(client, batch.output_file_id)
    assert sorted(each["custom_id"] for each in good) == sorted(f"line-{i}" for i in range(20))
    alone = client.completions.create(
        model="tiny",
        prompt="Number 7",
        max_tokens=2,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    [seventh] = [each for each in good if each["custom_id"] == "line-7"]
    assert seventh["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    bad = results(client, batch.error_file_id)
    assert len(bad) == 10
    assert all(each["error"] or each["response"]["status_code"] in (400, 404) for each in bad)
    file = client.files.retrieve(batch.output_file_id or "")
    assert file.purpose == "batch_output" and file.bytes > 0


def test_lists_are_paged_and_files_deleted(server: BatchServer):
    client = server.client()
    ids = [upload(client, requests(1), f"page-{i}.jsonl") for i in range(3)]
    newest = [each.id for each in client.files.list(limit=1)]  # the client turns the pages
    assert newest[:3] == ids[::-1]
    oldest = client.files.list(order="asc", purpose="batch").data
    assert [each.id for each in oldest][-3:] == ids
    assert client.files.content(ids[0]).text == requests(1)[0] + "\n"
    for file_id in ids:
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file_id)
    batches = [begin(client, requests(1)) for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)][:3] == batches[::-1]
    for batch_id in batches:
        ended(client, batch_id)


def test_another_tenant_finds_nothing(server: BatchServer):
    one, two = server.client("sk-one"), server.client("sk-two")
    batch_id = begin(one, requests(1))
    batch = ended(one, batch_id)
    assert not two.files.list().data and not two.batches.list().data
    for file_id in (batch.input_file_id, batch.output_file_id or ""):
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
        assert one.files.retrieve(file_id).id == file_id
    for call in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch_id)
    with pytest.raises(openai.NotFoundError):
        two.batches.create(
            input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"
        )
    with server.process.http() as anyone:
        for path in ("/v1/files", f"/v1/files/{batch.input_file_id}/content", "/v1/batches"):
            assert anyone.get(path).status_code == 401
        assert anyone.post("/v1/files", files={"file": ("a", b"b")}).status_code == 401


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "..\\..\\passwd", "a/../passwd", "a\x7fpasswd"]
)
def test_a_files_name_is_only_shown(server: BatchServer, name: str):
    with server.http() as http:
        sent = http.post(
            "/v1/files", files={"file": (name, b"{}")}, data={"purpose": "batch"}
        ).json()
        assert sent["filename"].endswith("passwd") and sent["filename"].isprintable()
        assert not {"/", "\\"} & {*sent["filename"]}
        content = http.get(f"/v1/files/{sent['id']}/content")
        assert content.content == b"{}"
        assert content.headers["x-content-type-options"] == "nosniff"
        assert content.headers["content-disposition"].startswith("attachment")
        assert http.delete(f"/v1/files/{sent['id']}").status_code == 200
    found = [path for path in server.folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert {path.suffix[1:] for path in found} <= NAMES
    assert all(path.stem.startswith(("file-", "batch_")) for path in found)
    assert all(path.parent.parent == server.folder for path in found)


@pytest.mark.parametrize(
    "path",
    ["..%2f..%2fkeys", "file-" + "0" * 32, "lock", "%00", "..%2e", "file-../../lock", "x" * 5000],
)
def test_an_id_is_no_path(server: BatchServer, path: str):
    with server.http() as http:
        for address in (f"/v1/files/{path}", f"/v1/files/{path}/content", f"/v1/batches/{path}"):
            assert http.get(address).status_code in (400, 404, 405), address
        assert http.delete(f"/v1/files/{path}").status_code in (400, 404, 405)


FORM = {"purpose": "batch"}


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        ({"json": {"file": "a"}}, 400, "Send a form"),
        ({"data": {"purpose": "batch", "file": "a"}}, 400, "Send a form"),
        ({"files": {"other": ("a", b"b")}, "data": FORM}, 400, "file: send one"),
        ({"files": {"file": ("a", b"b")}}, 400, "purpose: only"),
        ({"files": {"file": ("a", b"b")}, "data": {"purpose": "vision"}}, 400, "purpose: only"),
        ({"files": [("file", ("a", b"b"))] * 2, "data": FORM}, 400, "The form cannot be read"),
        ({"files": {"file": ("a", b"b" * 2_000_001)}, "data": FORM}, 413, "at most"),
        ({"files": {"file": ("a", b"b" * 9_000_000)}, "data": FORM}, 413, "larger than"),
        (
            {"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
            400,
            "The form cannot be read",
        ),
        (
            {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
            400,
            "The form cannot be read",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_odd_uploads_are_told_what_is_wrong(
    server: BatchServer, sent: dict[str, Any], status: int, says: str
):
    with server.http() as http:
        before = http.get("/v1/files").json()["data"]
        answer = http.post("/v1/files", **sent)
        assert answer.status_code == status, answer.text
        assert says in answer.json()["error"]["message"]
        assert http.get("/v1/files").json()["data"] == before


def test_a_tenant_keeps_a_bounded_number_of_files(server: BatchServer):
    two = server.client("sk-two")
    ids = [upload(two, requests(1)) for _ in range(40)]
    with pytest.raises(openai.PermissionDeniedError, match="delete some"):
        upload(two, requests(1))
    for file_id in ids:
        two.files.delete(file_id)


def test_odd_batches_are_told_what_is_wrong(server: BatchServer):
    client = server.client()
    file_id = upload(client, requests(1))
    good = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    with server.http() as http:
        for change, status, says in [
            ({"input_file_id": "file-" + "0" * 32}, 404, "There is no file"),
            ({"endpoint": "/v1/files"}, 400, "endpoint: it must be one of /v1/chat/completions"),
            ({"completion_window": "soon"}, 400, "completion_window: it is a time"),
            ({"completion_window": "31d"}, 400, "completion_window: it is a time"),
            ({"metadata": {"a": "b" * 600}}, 400, "metadata: it has up to"),
            ({"metadata": {str(i): "b" for i in range(17)}}, 400, "metadata: it has up to"),
        ]:
            answer = http.post("/v1/batches", json=good | change)
            assert answer.status_code == status, answer.text
            assert says in answer.json()["error"]["message"]
    batch = ended(client, begin(client, ["", ""]))
    assert batch.status == "failed"
    client.files.delete(file_id)


def test_other_requests_go_first_and_a_batch_is_cancelled(server: BatchServer):
    """More lines than there are places, and none of them ends."""
    client = server.client()
    batch_id = begin(client, requests(50, max_tokens=8000))
    eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress")
    for i in range(3):
        answer = client.completions.create(
            model="tiny", prompt=f"Interactive {i}", max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 4
    batch = client.batches.retrieve(batch_id)
    assert batch.status == "in_progress"
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = ended(client, batch_id)
    assert batch.status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_a_killed_server_goes_on_with_its_batch(server: BatchServer):
    count, parts, kills = effort(300, 10_000), effort(3, 40), effort((1,), (8, 16, 24))
    client = server.client()
    batch_id = begin(client, requests(count))
    for part in range(1, parts):  # each is waited for by itself, however long all take together
        enough = part * count // parts

        def is_far_enough(client: openai.OpenAI = client, enough: int = enough) -> bool:
            counts = client.batches.retrieve(batch_id).request_counts
            return counts is not None and counts.completed >= enough

        eventually(is_far_enough)
        if part in kills:
            server.kill()
            server.start()
            client = server.client()
    batch = ended(client, batch_id)
    assert batch.status == "completed"
    found = [each["custom_id"] for each in results(client, batch.output_file_id)]
    assert sorted(found) == sorted(f"line-{i}" for i in range(count))
