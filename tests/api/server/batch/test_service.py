"""Batches over an application that answers at once: how they end, and how they go on."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import BAD_LINES, request, results_in
from patience import PATIENCE_S

from quire.api.server.batch.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from quire.api.server.batch.service import BATCHES_AT_ONCE, Batches
from quire.api.server.batch.store import FileStore, TenantFiles
from quire.api.server.errors import ApiError
from quire.api.server.keys import ANYONE, CALLER, Tenant
from quire.api.server.settings import ServerConfig
from quire.errors import ConfigError

ONE, TWO = Tenant("a" * 64, "one"), Tenant("b" * 64, "two")
ENDPOINT = "/v1/completions"


class FakeApp:
    """Answers with the prompt; `gate`, where one is set, is awaited first."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.callers: list[Tenant] = []
        self.gate: Callable[[], Awaitable[None]] | None = None
        self.statuses: list[int] = []  # of the next answers; 200 when there are no more
        self.most_at_once = self._num_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[str(prompt)] += 1
        self.callers.append(scope[CALLER])
        self._num_open += 1
        self.most_at_once = max(self.most_at_once, self._num_open)
        try:
            await (self.gate() if self.gate is not None else asyncio.sleep(0))
        finally:
            self._num_open -= 1
        status = self.statuses.pop() if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"is": prompt}).encode()})


class Service:
    """A store in a folder, and its batches while an event loop runs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = ServerConfig(batch_dir=str(folder), batch_concurrency=8, **settings)
        self.app = FakeApp()
        self.store = FileStore(self.settings)

    def open(self, *tenants: Tenant) -> Batches:
        return Batches(self.settings, self.store, self.app, [ENDPOINT], tenants or [ANYONE])

    def files(self, tenant: Tenant = ANYONE) -> TenantFiles:
        return self.store.of(tenant)

    def reopen(self) -> None:
        """As another server would, after this one is gone."""
        self.store.close()
        self.store = FileStore(self.settings)

    def add(self, lines: list[str], tenant: Tenant = ANYONE, **changes: Any) -> BatchRecord:
        files = self.files(tenant)
        file_id = files.begin_upload(0)
        files.data(file_id).write_text("".join(f"{line}\n" for line in lines))
        files.add_file(FileRecord(file_id, files.data(file_id).stat().st_size, "in", "batch"))
        files.end_upload(file_id)
        record = BatchRecord(new_batch_id(), ENDPOINT, file_id, "24h", time.time() + 1e5, None)
        record = replace(record, **changes)
        files.add_batch(record)
        return record

    def ids(self, file_id: str | None, tenant: Tenant = ANYONE) -> list[str]:
        if file_id is None:
            return []
        return [each["custom_id"] for each in results_in(self.files(tenant).data(file_id))]


@pytest.fixture
def service(tmp_path: Path):
    service = Service(tmp_path)
    yield service
    service.store.close()


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


async def ended(*records: BatchRecord) -> None:
    while not all(each.has_ended for each in records):
        await asyncio.sleep(0.001)


def requests(count: int) -> list[str]:
    return [request(f"line-{i}", f"{i}") for i in range(count)]


def test_every_line_has_one_result(service: Service):
    async def main() -> dict[str, Any]:
        record = service.add([*requests(50), *BAD_LINES[:7]])
        full = asyncio.Event()

        async def gate() -> None:
            if service.app.most_at_once == 8:
                full.set()
            await full.wait()

        service.app.gate = gate
        service.open()
        await ended(record)
        return record.shown()

    shown = run(main())
    assert shown["status"] == "completed"
    assert shown["request_counts"] == {"total": 57, "completed": 50, "failed": 7}
    assert sorted(service.ids(shown["output_file_id"])) == sorted(f"line-{i}" for i in range(50))
    assert len(service.ids(shown["error_file_id"])) == 7
    assert service.app.most_at_once == 8
    assert all(each.in_background for each in service.app.callers)
    assert {*service.files().files} >= {shown["output_file_id"], shown["error_file_id"]}
    for moment in ("created_at", "in_progress_at", "finalizing_at", "completed_at"):
        assert isinstance(shown[moment], int)


def test_what_is_not_the_lines_answer_is_asked_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("quire.api.server.batch.run.AGAIN_S", 0)

    async def main() -> BatchRecord:
        record = service.add(requests(4))
        service.app.statuses = [500, 503, 429, 503]
        service.open()
        await ended(record)
        return record

    record = run(main())
    assert (record.completed, record.failed) == (3, 1)  # a 500 is an answer
    assert service.app.asked.total() == 7


def test_a_server_that_stops_in_the_middle_is_gone_on_with(service: Service):
    async def first() -> BatchRecord:
        record = service.add(requests(40))
        num_asked = 0

        async def gate() -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked > 20:
                await asyncio.Event().wait()

        service.app.gate = gate
        batches = service.open()
        while record.completed < 20:
            await asyncio.sleep(0.001)
        await batches.stop()
        return record

    record = run(first())
    assert record.status == "in_progress"
    service.reopen()
    service.app.gate = None
    again = service.files().batch(record.id)
    assert again is not record and again.status == "in_progress"

    async def second() -> None:
        service.open()
        await ended(again)

    run(second())
    assert again.status == "completed" and again.completed == 40
    assert sorted(service.ids(again.output_file)) == sorted(f"line-{i}" for i in range(40))
    num_again = sum(count > 1 for count in service.app.asked.values())
    assert num_again <= 8  # only those that were under way


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_batch_is_gone_on_with_wherever_it_was(service: Service, status: str):
    record = service.add(requests(3), status=status, total=3)
    service.reopen()

    async def main() -> BatchRecord:
        again = service.files().batch(record.id)
        service.open()
        await ended(again)
        return again

    again = run(main())
    if status in ("validating", "in_progress"):
        assert (again.status, again.completed) == ("completed", 3)
    else:
        assert again.status == {"finalizing": "completed", "cancelling": "cancelled"}[status]
        assert again.completed == 0 and again.shown()["output_file_id"] is None


def test_a_cancelled_batch_keeps_what_was_answered(service: Service):
    async def main() -> tuple[BatchRecord, BatchRecord]:
        record, other = service.add(requests(30)), service.add(requests(3))

        async def gate() -> None:
            if service.app.asked.total() > 10:
                await ended(record)  # lines of the other batch may be among these

        service.app.gate = gate
        batches = service.open()
        while not record.completed:
            await asyncio.sleep(0.001)
        assert batches.cancel(ANYONE, record.id).status == "cancelling"
        batches.cancel(ANYONE, record.id)
        await ended(record, other)  # the next one begins
        with pytest.raises(ApiError, match="can no longer be cancelled"):
            batches.cancel(ANYONE, record.id)
        return record, other

    record, other = run(main())
    assert record.status == "cancelled" and other.status == "completed"
    shown = record.shown()
    assert shown["cancelled_at"] and shown["completed_at"] is None
    assert 0 < len(service.ids(shown["output_file_id"])) == record.completed < 30


def test_lines_behind_the_end_of_the_window_have_errors(service: Service):
    async def main() -> BatchRecord:
        record = service.add(requests(5), expires=time.time() - 1)
        service.open()
        await ended(record)
        return record

    record = run(main())
    assert record.status == "expired" and record.failed == 5
    results = results_in(service.files().data(record.error_file))
    assert {each["error"]["code"] for each in results} == {"batch_expired"}
    assert not service.app.asked


def test_an_empty_file_and_a_file_that_is_gone_fail(service: Service):
    async def main() -> list[BatchRecord]:
        empty = service.add(["", "  "])
        gone = service.add(requests(1))
        service.files().data(gone.input_file).unlink()
        good = service.add(requests(1))
        service.open()
        await ended(empty, gone, good)
        return [empty, gone, good]

    empty, gone, good = run(main())
    assert [each.status for each in (empty, gone, good)] == ["failed", "failed", "completed"]
    assert empty.shown()["errors"]["data"][0]["code"] == "empty_file"
    assert gone.shown()["errors"]["data"][0]["code"] == "disk"


def test_a_tenants_batches_are_asked_in_its_name(service: Service):
    async def main() -> list[BatchRecord]:
        records = [service.add(requests(20), tenant) for tenant in (ONE, ONE, TWO)]
        service.open(ONE, TWO)
        await ended(*records)
        return records

    records = run(main())
    assert all(each.completed == 20 for each in records)
    assert {each.salt for each in service.app.callers} == {ONE.salt, TWO.salt}


@pytest.mark.parametrize("tenant", [ONE, TWO])
def test_a_batch_does_not_wait_for_lines_that_do_not_end(service: Service, tenant: Tenant):
    """One has taken all slots when another begins, of the same tenant or of another one."""

    async def main() -> tuple[BatchRecord, BatchRecord]:
        slow = service.add(requests(20), ONE)

        async def gate() -> None:
            await asyncio.Event().wait()

        service.app.gate = gate
        batches = service.open(ONE, TWO)
        while service.app.asked.total() < 8:
            await asyncio.sleep(0.001)
        service.app.gate = None
        quick = service.add(requests(20), tenant)
        batches.create(tenant, quick)
        await ended(quick)
        await batches.stop()
        return slow, quick

    slow, quick = run(main())
    assert quick.completed == 20 and slow.completed == 0


def test_a_batch_on_its_last_line_leaves_its_slots_to_the_next(service: Service):
    async def main() -> None:
        async def gate() -> None:
            await asyncio.Event().wait()

        service.app.gate = gate
        service.add(requests(1), ONE)
        batches = service.open(ONE, TWO)
        while service.app.asked.total() < 1:
            await asyncio.sleep(0.001)
        batches.create(TWO, service.add(requests(20), TWO))
        while service.app.asked.total() < 1 + 7:
            await asyncio.sleep(0.001)
        await batches.stop()

    run(main())
    assert service.app.most_at_once == 8


def test_a_tenant_runs_a_few_batches_at_once_and_all_in_the_end(service: Service):
    async def main() -> list[BatchRecord]:
        records = [service.add(requests(3)) for _ in range(2 * BATCHES_AT_ONCE + 1)]
        service.open()
        await ended(*records)
        return records

    records = run(main())
    assert all(each.completed == 3 for each in records)
    assert service.app.most_at_once <= 8


def test_a_tenants_ids_are_unknown_to_others(service: Service):
    record = service.add(requests(1), ONE)
    for files in (service.files(TWO), service.files(ANYONE)):
        with pytest.raises(ApiError):
            files.file(record.input_file)
        with pytest.raises(ApiError):
            files.delete_file(record.input_file)
        with pytest.raises(ApiError):
            files.batch(record.id)
    assert service.files(ONE).batch(record.id) is record


def test_what_a_kill_left_of_an_upload_is_removed(service: Service):
    record = service.add(requests(1))
    left = service.files().data(new_file_id())
    left.write_text("half")
    half = left.with_suffix(".new")
    half.write_text("{")
    service.files().data(record.output_file).write_text("")
    (service.files().folder / "batch_0.json").write_text("no record")
    (service.files().folder / f"{new_batch_id()}.json").write_text("{}")
    service.reopen()
    assert service.files().file(record.input_file).filename == "in"
    assert not left.exists() and not half.exists()
    assert service.files().data(record.output_file).exists()


def test_the_folder_is_one_servers(service: Service, tmp_path: Path):
    with pytest.raises(ConfigError, match="Another server uses batch_dir"):
        FileStore(service.settings)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        FileStore(ServerConfig(batch_dir=str(tmp_path / "file")))


def test_old_batches_make_room_and_open_ones_do_not(tmp_path: Path):
    service = Service(tmp_path, max_files=3)
    first = service.add([], status="completed", created=1.0)
    kept = service.add([], created=2.0)
    files = service.files()
    for _ in range(2):
        files.add_batch(replace(first, id=new_batch_id(), status="validating"))
    assert first.id not in files.batches and kept.id in files.batches
    with pytest.raises(ApiError, match="3 batches are open already"):
        files.add_batch(replace(first, id=new_batch_id()))
    service.store.close()


def test_files_of_many_lines_are_never_in_memory_as_a_whole(service: Service):
    lines = [request(f"line-{i}", f"{i}", user="x" * 8000) for i in range(3000)]

    async def main() -> BatchRecord:
        record = service.add(lines)
        lines.clear()
        tracemalloc.start()
        service.open()
        await ended(record)
        return record

    record = run(main())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = service.files().file(record.input_file).bytes
    assert record.completed == 3000 and size > 24e6
    assert peak < size / 4
