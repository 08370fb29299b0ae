"""The connector's settings, from `kv_connector_extra_config`: Quire's own, by their own names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.config import parse_size
from quire.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Sizes are of the whole engine: each worker has its share."""

    host_cache_bytes: int | str = 0
    ssd_cache_dir: str | None = None
    ssd_cache_bytes: int | str | None = None
    remote_cache_url: str | None = None
    tenant_cache_share: float = 1.0
    model_name: str = ""  # of a model that has no folder: whatever tells its weights from others

    @classmethod
    def create(cls, extra: Mapping[str, Any]) -> Settings:
        known = [field.name for field in fields(cls)]
        for name in extra:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
                raise ConfigError(f"kv_connector_extra_config has no setting {name!r}; {hint}")
        return cls(**extra)

    def tiers_of(self, worker: int, num_workers: int) -> dict[str, Any]:
        """The arguments of `open_store` for one worker."""
        ssd, folders = self.ssd_cache_bytes, self.ssd_cache_dir
        if num_workers > 1 and isinstance(folders, str):
            each = (Path(folder.strip()) / f"worker-{worker}" for folder in folders.split(","))
            folders = ",".join(map(str, each))
        return {
            "host_cache_bytes": _share(self.host_cache_bytes, num_workers),
            "ssd_cache_dir": folders,
            "ssd_cache_bytes": None if ssd is None else _share(ssd, num_workers),
            "remote_cache_url": self.remote_cache_url,
            "tenant_cache_share": self.tenant_cache_share,
        }


def _share(size: int | str, num_workers: int) -> int:
    try:
        return parse_size(size) // num_workers
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"A size is bytes or text such as 8GiB, not {size!r}.") from None
