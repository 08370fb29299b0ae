"""The URL of a remote store: what it asks for, and what of it may be shown."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """A URL taken apart. Its password is in `parts` and nowhere else."""

    parts: SplitResult
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> Address:
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  (a port that is no number raises here)
        except ValueError:
            raise ConfigError(
                "The remote cache's URL cannot be read; write it as scheme://host:port?options, "
                "with special characters of a password percent-encoded."
            ) from None
        return cls(parts, dict(parse_qsl(parts.query, keep_blank_values=True)))

    def __repr__(self) -> str:
        return f"Address({self.shown})"

    @property
    def scheme(self) -> str:
        return self.parts.scheme

    @property
    def shown(self) -> str:
        """Scheme, host, port and path: enough to know which one is meant."""
        host = self.parts.netloc.rpartition("@")[2]
        return f"{self.scheme}://{host}{self.parts.path}"

    def hide(self, text: str) -> str:
        """`text` without the password."""
        password = self.parts.password
        for secret in {password, unquote(password)} if password else ():
            text = text.replace(secret, "***")
        return text

    def check_options(self, known: Collection[str]) -> None:
        for name in self.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                mend = f"did you mean {near[0]}?" if near else f"it may be {', '.join(known)}."
                raise ConfigError(f"The remote cache's URL has the unknown option {name!r}; {mend}")

    def seconds(self, name: str) -> float | None:
        """An option that is a time."""
        text = self.options.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"The remote cache's {name}={text} is no time; give seconds above zero, such as "
                f"{name}=2."
            )
        return value
