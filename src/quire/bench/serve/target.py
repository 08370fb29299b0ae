"""The server under load: where it is, and how a request is put to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.bench.serve.workload import Request, ServeWorkload
from quire.errors import ConfigError

PATHS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Target:
    """All that a process needs to know to send requests."""

    base: str  # ends in /v1
    model: str
    api: str
    as_ids: bool
    with_ids: bool  # whether answers are to have token ids: a model without a tokenizer has no text
    temperature: float
    ignore_eos: bool
    timeout: float
    api_key: str | None = None

    @property
    def url(self) -> str:
        return self.base + PATHS[self.api]

    @property
    def headers(self) -> dict[str, str]:
        # Who compresses a stream may hold back what is too short to be worth it.
        plain = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        return plain | key_header(self.api_key)

    def body(self, request: Request) -> bytes:
        fields: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt.text()}]
        else:
            fields["prompt"] = request.prompt.ids() if self.as_ids else request.prompt.text()
        fields |= {
            "max_tokens": request.num_out,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.with_ids:
            fields["return_token_ids"] = True
        if self.ignore_eos:  # only when asked for: OpenAI has no such field
            fields["ignore_eos"] = True
        return json.dumps(fields).encode()


def make_target(workload: ServeWorkload, base: str, model: str, api: str, **others: Any) -> Target:
    if api == "chat" and workload.as_ids:
        raise ConfigError("--api chat takes no token ids; leave out --prompts ids.")
    return Target(
        base=base,
        model=model,
        api=api,
        as_ids=workload.as_ids,
        with_ids=workload.as_ids,
        temperature=workload.temperature,
        ignore_eos=workload.ignore_eos,
        **others,
    )


def base_url(text: str) -> str:
    """`http://host:8000`, with or without `/v1`."""
    address = text.rstrip("/")
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"--url takes an address such as http://127.0.0.1:8000, not {text!r}.")
    return address if address.endswith("/v1") else f"{address}/v1"


def key_header(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def without_secrets(url: str) -> str:
    """A name and a password may stand before the host."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
