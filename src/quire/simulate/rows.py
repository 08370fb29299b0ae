"""What is compared: a way of routing, the tiers below the device, and who chooses what they keep.

random                          requests go anywhere, and there is only the device's own cache
prefix+host+ssd                 to the replica with the longest prefix; two tiers, the tiers' policy
prefix+host/lru                 the same with one tier that keeps what was used last
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from quire.checks import did_you_mean
from quire.errors import ConfigError

ROUTERS = ("random", "prefix")
TIERS = ("host", "ssd", "remote")
KNOWN = [
    f"{'+'.join([router, *tiers])}{policy}"
    for router in ROUTERS
    for num in range(len(TIERS) + 1)
    for tiers in combinations(TIERS, num)
    for policy in ("", "/lru")
]
DEFAULT = (
    "random",
    "random+host",
    "random+remote",
    "prefix",
    "prefix+host/lru",
    "prefix+host",
    "prefix+host+ssd",
    "prefix+host+ssd+remote",
)


@dataclass(frozen=True)
class Row:
    name: str

    @property
    def router(self) -> str:
        return self._parts[0]

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(self._parts[1:])

    @property
    def policy(self) -> str:
        return "lru" if self.name.endswith("/lru") else "policy"

    @property
    def _parts(self) -> list[str]:
        return self.name.removesuffix("/lru").split("+")


def read_rows(text: str) -> list[Row]:
    names = text.replace(",", " ").split()
    if not names:
        raise ConfigError(f"--rows is empty; name some, such as {','.join(DEFAULT[:3])}.")
    for name in names:
        if name not in KNOWN:
            mend = did_you_mean(name, KNOWN) or f"; a row is like {' or '.join(DEFAULT[-3:])}."
            raise ConfigError(f"There is no row {name!r}{mend}")
    return [Row(name) for name in names]
