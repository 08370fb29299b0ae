"""Every setting of the server, said once; the flags of `quire serve` are made from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quire.api.reasoning.names import OFF, PARSER_NAMES
from quire.api.tools.names import AUTO, FORMAT_NAMES
from quire.checks import INT32_MAX, Check, apply_checks, flag, number, setting, whole_number
from quire.config import one_of, size, text
from quire.errors import ConfigError
from quire.lora_request import read_module
from quire.replicas.routers import ROUTING

MAX_NAMES = 64
DAY_S = 86_400


def _texts(what: str) -> Check:
    def accept(value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else tuple(value)
        if len(texts) > MAX_NAMES or not all(isinstance(each, str) and each for each in texts):
            raise ValueError(value)
        return texts

    return Check(f"up to {MAX_NAMES} {what}", accept)


def _modules() -> Check:
    def accept(value: Any) -> tuple[str, ...]:
        modules = [read_module(each) for each in ([value] if isinstance(value, str) else value)]
        if len({module.name for module in modules}) < len(modules):
            raise ConfigError("lora_modules has a name twice; give each adapter one of its own.")
        return tuple(f"{module.name}={module.path}" for module in modules)

    says = "adapters as name=path, or as JSON with name and path"
    return Check(says, accept, takes_several=True)


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, which clients it lets in, and how much it accepts of them."""

    host: str = setting(
        "127.0.0.1", text("a host's name or address"), "address to listen on; 0.0.0.0 is all"
    )
    port: int = setting(8000, whole_number(0, 65_535), "port to listen on; 0 takes a free one")
    served_model_name: Collection[str] = setting(
        (), _texts("names"), "name clients use for the model (default: MODEL); repeatable"
    )
    lora_modules: Collection[str] = setting(
        (),
        _modules(),
        "adapters to serve over the model, each as NAME=PATH, or as JSON with name and path",
    )
    lora_folder: str | None = setting(
        None,
        text("a folder's path"),
        "let callers with an API key load and unload adapters that are below this folder",
    )
    api_keys_file: str | None = setting(
        None,
        text("a file's path"),
        "file with one API key a line, and a group's name behind it if keys share a cache "
        "(keys of the group `operator` see everyone's requests on the page); "
        "QUIRE_API_KEYS in the environment does the same with commas",
    )
    allowed_origin: Collection[str] = setting(
        (), _texts("origins"), "web origin that browsers may call from (CORS); repeatable"
    )
    allowed_host: Collection[str] = setting(
        (),
        _texts("host names"),
        "name under which the server is reached besides localhost and its address; `.example.com` "
        "is every name below it, `*` is any; repeatable",
    )
    chat_template: str | None = setting(
        None,
        text("a file's path, or a template"),
        "chat template in place of the model's own: a file, or the template itself",
    )
    tool_format: str = setting(
        AUTO,
        one_of(AUTO, *FORMAT_NAMES),
        "how the model writes calls of tools; auto looks at its chat template",
    )
    reasoning_parser: str = setting(
        AUTO,
        one_of(AUTO, OFF, *PARSER_NAMES),
        "how the model marks its thoughts; auto looks at its chat template, off leaves them in "
        "the text; vLLM's names are understood",
    )
    max_queued_requests: int = setting(
        1024, whole_number(1, INT32_MAX), "requests that may wait for their turn; more get a 429"
    )
    max_queued_tokens: int = setting(
        4_194_304,
        whole_number(1, INT32_MAX),
        "prompt tokens that may wait for their turn; more get a 429",
    )
    max_queue_seconds: float = setting(
        300.0, number(0.001, DAY_S), "longest wait for a turn before a request is given up"
    )
    max_body_bytes: int = setting(8 * 1024**2, size(), "largest request body; more gets a 413")
    max_header_bytes: int = setting(
        64 * 1024, size(), "largest head of a request (its first line and headers); more gets a 431"
    )
    max_connections: int = setting(
        8192, whole_number(1, INT32_MAX), "connections at once; more get a 503"
    )
    request_seconds: float = setting(
        30.0,
        number(0.001, DAY_S),
        "time for the head of a request to come, and then for its body, "
        "which gets one more second for each 1,000 bytes",
    )
    keep_alive_seconds: int = setting(
        65,  # longer than clients and proxies keep a connection that they may use again
        whole_number(1, DAY_S),
        "time for which a connection is kept for the next request",
    )
    unread_seconds: float = setting(
        120.0,
        number(0.001, DAY_S),
        "longest time for which a client may leave unread what it was sent",
    )
    max_stored_responses: int = setting(
        1000,
        whole_number(0, INT32_MAX),
        "responses of /v1/responses that are kept for each tenant, the newest ones; 0 keeps none",
    )
    max_stored_response_bytes: int = setting(
        64 * 1024**2, size(), "memory for the responses that are kept for each tenant"
    )
    batch_dir: str | None = setting(
        None,
        text("a folder's path"),
        "folder for the files of /v1/files and /v1/batches; without one there are none",
    )
    batch_concurrency: int = setting(
        256,
        whole_number(1, 65_536),
        "lines of batches that are answered at once; they give way to other requests",
    )
    max_file_bytes: int = setting(
        200 * 1024**2, size(), "largest file that may be uploaded; more gets a 413"
    )
    max_files: int = setting(
        1000, whole_number(1, INT32_MAX), "files that a tenant may keep, results of batches too"
    )
    max_stored_bytes: int = setting(
        4 * 1024**3, size(), "bytes that the files of a tenant may take together"
    )
    page: bool = setting(
        True, flag(), "serve the page at /, and keep the stories of the last requests for it"
    )
    log_requests: bool = setting(True, flag(), "write one line of JSON for each request")
    tensorboard: str | None = setting(
        None, text("a folder's path"), "write curves for TensorBoard into this folder"
    )
    replicas: int = setting(
        1,
        whole_number(1, 1024),
        "engines that share the work, each with a GPU of its own where there are enough",
    )
    prefill_replicas: int = setting(
        0,
        whole_number(0, 1024),
        "of the replicas, those that only compute prompts, for the others to load from "
        "remote_cache_url",
    )
    routing: str = setting(
        "prefix",
        one_of(*ROUTING),
        "which of the replicas gets a request: the one with the longest cached prefix, or any",
    )
    drain_seconds: float = setting(
        30.0, number(0, DAY_S), "time that open requests get to end after SIGTERM"
    )

    def __post_init__(self) -> None:
        apply_checks(self, ConfigError)

    @property
    def has_adapters(self) -> bool:
        return bool(self.lora_modules) or self.lora_folder is not None
