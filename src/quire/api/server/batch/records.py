"""What is known of a file and of a batch: kept as JSON beside the data, and shown to clients."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.api.server.errors import ApiError

ENDED = ("completed", "failed", "expired", "cancelled")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


@dataclass
class FileRecord:
    id: str
    bytes: int
    filename: str
    purpose: str
    created: float = field(default_factory=time.time)

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass
class BatchRecord:
    """`output_file` and `error_file` are ids from the beginning; clients see them at the end."""

    id: str
    endpoint: str
    input_file: str
    completion_window: str
    expires: float
    metadata: dict[str, str] | None
    output_file: str = field(default_factory=new_file_id)
    error_file: str = field(default_factory=new_file_id)
    status: str = "validating"
    moments: dict[str, float] = field(default_factory=dict)  # when each status began
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    created: float = field(default_factory=time.time)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        self.moments.setdefault(status, time.time())

    def shown(self) -> dict[str, Any]:
        def at(status: str) -> int | None:
            return int(self.moments[status]) if status in self.moments else None

        is_shown = self.has_ended and self.status != "failed"
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file if is_shown and self.completed else None,
            "error_file_id": self.error_file if is_shown and self.failed else None,
            "created_at": int(self.created),
            "in_progress_at": at("in_progress"),
            "expires_at": int(self.expires),
            "finalizing_at": at("finalizing"),
            "completed_at": at("completed"),
            "failed_at": at("failed"),
            "expired_at": at("expired"),
            "cancelling_at": at("cancelling"),
            "cancelled_at": at("cancelled"),
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


def save(record: FileRecord | BatchRecord, folder: Path) -> None:
    """As a whole or not at all, whenever the process ends."""
    path = folder / f"{record.id}.json"
    half = path.with_suffix(".new")
    half.write_text(json.dumps(asdict(record)))
    half.replace(path)


def page(
    records: list[Any], after: str | None, limit: int, newest_first: bool = True
) -> dict[str, Any]:
    """A part of a list, as OpenAI's clients turn the pages: from behind the record `after` on."""
    ordered = sorted(records, key=lambda each: (each.created, each.id), reverse=newest_first)
    if after is not None:
        places = [i for i, each in enumerate(ordered) if each.id == after]
        if not places:
            raise ApiError(404, f"There is no {after[:100]!r} to list from.", param="after")
        ordered = ordered[places[0] + 1 :]
    data = [each.shown() for each in ordered[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }
