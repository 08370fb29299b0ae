"""The batches of a server, run behind other requests, a few of each tenant at once.

    validating ─► in_progress ─► finalizing ─► completed, or expired if its time is over
        │             ╰─► cancelling ─► cancelled
        ╰─► failed

A batch's record says where it stands, its result files which lines are answered. A server that
starts goes on with every batch that has not ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp

from quire.api.server.batch.in_process import InProcessClient
from quire.api.server.batch.lines import count_lines
from quire.api.server.batch.records import BatchRecord, FileRecord
from quire.api.server.batch.run import BatchRun
from quire.api.server.batch.slots import LineSlots
from quire.api.server.batch.store import FileStore, TenantFiles
from quire.api.server.errors import ApiError
from quire.api.server.keys import Tenant
from quire.api.server.settings import ServerConfig

log = logging.getLogger("quire.server")

RESULTS = "batch_output"  # the purpose of a file of results
LOOK_S = 0.2
BATCHES_AT_ONCE = 4  # of a tenant: a short one need not wait for the end of a long one


class Batches:
    def __init__(
        self,
        settings: ServerConfig,
        store: FileStore,
        app: ASGIApp,
        endpoints: Sequence[str],
        tenants: Sequence[Tenant],
    ) -> None:
        """`app` has the routes that lines ask; batches of `tenants` are gone on with."""
        self.endpoints = endpoints
        self._settings = settings
        self._store = store
        self._app = app
        self._slots = LineSlots(settings.batch_concurrency)
        self._workers: dict[Tenant, set[asyncio.Task[None]]] = {}
        self._is_stopping = False
        self._taken: set[str] = set()  # batches that a worker has
        self._runs: dict[str, asyncio.Task[None]] = {}  # by batch, those that ask for lines
        for tenant in tenants:
            for _ in store.of(tenant).open_batches():
                self._wake(tenant)

    def files(self, tenant: Tenant) -> TenantFiles:
        return self._store.of(tenant)

    def create(self, tenant: Tenant, record: BatchRecord) -> None:
        self.files(tenant).add_batch(record)
        self._wake(tenant)

    def cancel(self, tenant: Tenant, batch_id: str) -> BatchRecord:
        files = self.files(tenant)
        record = files.batch(batch_id)
        if record.has_ended:
            says = f"The batch is {record.status}, and can no longer be cancelled."
            raise ApiError(409, says, code="batch_ended")
        if record.status != "finalizing":
            record.enter("cancelling")
            files.save_batch(record)
            if (run := self._runs.get(batch_id)) is not None:
                run.cancel()
        return record

    async def stop(self) -> None:
        """End all runs as they stand, and begin none; the next server goes on with them."""
        self._is_stopping = True
        workers = [worker for workers in self._workers.values() for worker in workers]
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)

    # --- a few workers for each tenant ------------------------------------------------------------

    def _wake(self, tenant: Tenant) -> None:
        """One more batch is open."""
        workers = self._workers.setdefault(tenant, set())
        if len(workers) < BATCHES_AT_ONCE and not self._is_stopping:
            workers.add(asyncio.create_task(self._work(tenant, workers)))

    async def _work(self, tenant: Tenant, workers: set[asyncio.Task[None]]) -> None:
        try:
            await self._run_all(tenant, self.files(tenant))
        finally:
            me = asyncio.current_task()
            assert me is not None
            workers.discard(me)  # at once: a batch that is opened now needs another worker

    async def _run_all(self, tenant: Tenant, files: TenantFiles) -> None:
        while (record := self._oldest_open(files)) is not None:
            self._taken.add(record.id)
            try:
                await self._run(tenant, files, record)
            except Exception as error:
                log.exception("The batch %s failed.", record.id)
                says = "The server could not read the batch or write its results; its log says why."
                code = "disk" if isinstance(error, OSError) else "server_error"
                _fail(files, record, code, says)
            finally:
                self._taken.discard(record.id)

    def _oldest_open(self, files: TenantFiles) -> BatchRecord | None:
        free = (each for each in files.open_batches() if each.id not in self._taken)
        return min(free, key=lambda each: each.created, default=None)

    async def _run(self, tenant: Tenant, files: TenantFiles, record: BatchRecord) -> None:
        source = files.data(record.input_file)
        if record.status == "validating":
            record.total = await asyncio.to_thread(count_lines, source)
            if not record.total:
                _fail(files, record, "empty_file", "The input file has no line in it.")
                return
            if record.status == "validating":  # it was not cancelled meanwhile
                record.enter("in_progress")
                files.save_batch(record)
        with self._slots.share(tenant) as slots:
            run = await asyncio.to_thread(
                BatchRun,
                source,
                InProcessClient(self._app, tenant),
                [record.endpoint],
                files.data(record.output_file),
                files.data(record.error_file),
                slots,
                max_line_bytes=self._settings.max_body_bytes,
                expires_at=record.expires,
            )
            try:
                await self._follow(run, record)
            finally:
                record.completed, record.failed = run.completed, run.failed
                await asyncio.shield(asyncio.to_thread(run.close))
        _finish(files, record)

    async def _follow(self, run: BatchRun, record: BatchRecord) -> None:
        """Run it to its end, or until it is cancelled, and keep its counts up to date."""
        if record.status != "in_progress":
            return
        running = self._runs[record.id] = asyncio.create_task(run.run())
        try:
            while not running.done():
                record.completed, record.failed = run.completed, run.failed
                await asyncio.wait({running}, timeout=LOOK_S)
            with suppress(asyncio.CancelledError):
                running.result()
        finally:
            del self._runs[record.id]
            if not running.done():
                running.cancel()
                await asyncio.wait({running})


def _finish(files: TenantFiles, record: BatchRecord) -> None:
    """Show the files of results; done again from anywhere in the middle, it comes to the same."""
    is_cancelled = record.status == "cancelling"
    if not is_cancelled:
        record.enter("finalizing")
        files.save_batch(record)
    for file_id, count, kind in [
        (record.output_file, record.completed, "output"),
        (record.error_file, record.failed, "error"),
    ]:
        path = files.data(file_id)
        if count:
            name = f"{record.id}_{kind}.jsonl"
            files.add_file(FileRecord(file_id, path.stat().st_size, name, RESULTS))
        else:
            path.unlink(missing_ok=True)
    is_late = record.moments.get("finalizing", 0) > record.expires
    record.enter("cancelled" if is_cancelled else "expired" if is_late else "completed")
    files.save_batch(record)


def _fail(files: TenantFiles, record: BatchRecord, code: str, message: str) -> None:
    record.errors.append({"code": code, "message": message, "param": None, "line": None})
    record.enter("failed")
    with suppress(OSError):  # then the next server finds out, too
        files.save_batch(record)
