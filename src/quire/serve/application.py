"""What Ray Serve is given to run: engines that it keeps and scales, and the server before them.

Ray's HTTP proxy ──► Ingress (routes, page, router) ──► EngineActor (one engine)
                                                   ╰──► EngineActor (one engine) …
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from quire.api.server.settings import ServerConfig
from quire.config import EngineConfig
from quire.errors import ConfigError

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError:
    raise ConfigError("quire.serve runs on Ray: pip install 'quire[ray]'.") from None

from quire.serve.engine_actor import EngineActor
from quire.serve.ingress import Ingress
from quire.serve.targets import TargetRouter

NO_LIMIT = 1_000_000  # requests that Ray lets through at once: queues are the engines' own
HEALTH_EVERY_S = 2.0
HUNG_S = 100.0  # a step may be long; Ray gives a replica up that does not answer three times
CONNECTIONS = "connections are Ray's proxy's; see serve.start(http_options=…)"
RAYS_OWN = {
    "host": "serve.start(http_options=…) says where to listen",
    "port": "serve.start(http_options=…) says where to listen",
    "keep_alive_seconds": CONNECTIONS,
    "max_connections": CONNECTIONS,
    "max_header_bytes": CONNECTIONS,
    "request_seconds": CONNECTIONS,
    "unread_seconds": CONNECTIONS,
    "prefill_replicas": "every replica does both",
    "replicas": "num_replicas or autoscaling_config says how many there are",
}


def deployment(
    model: str = "smollm2",
    *,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A Serve application of replicas of one engine, behind the API and the page of `quire serve`.

    `settings` are those of the engine and of the server. `autoscaling_config` and
    `ray_actor_options` (GPUs and CPUs of a replica) are Ray's.
    """
    if num_replicas is not None and autoscaling_config is not None:
        raise ConfigError("Give num_replicas or autoscaling_config, not both.")
    for name, instead in RAYS_OWN.items():
        if name in settings:
            raise ConfigError(f"{name} is not a setting on Ray: {instead}.")
    of_server = {field.name for field in fields(ServerConfig)}
    server = ServerConfig(**{key: settings.pop(key) for key in of_server & settings.keys()})
    if server.has_adapters:
        settings["enable_lora"] = True
    engine = EngineConfig.create(model=model, **settings)
    count: dict[str, Any] = {"num_replicas": num_replicas or 1}
    if autoscaling_config is not None:
        count = {"autoscaling_config": _scaling(autoscaling_config, engine)}
    common = {
        "max_ongoing_requests": NO_LIMIT,
        "graceful_shutdown_timeout_s": server.drain_seconds,
        "health_check_period_s": HEALTH_EVERY_S,
        "health_check_timeout_s": HUNG_S,
        "logging_config": {"enable_access_log": False},  # the server has a line of its own for each
    }
    replica = serve.deployment(EngineActor).options(
        name="Replica",
        ray_actor_options=dict(ray_actor_options or {}),
        request_router_config=RequestRouterConfig(request_router_class=TargetRouter),
        **common,
        **count,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        max_surge_percent=100,  # another one comes before this one goes
        **common,
    )
    engines = replica.bind(asdict(engine), journal=server.page)
    return ingress.bind(asdict(server), asdict(engine), engines)


def _scaling(given: Mapping[str, Any], engine: EngineConfig) -> dict[str, Any]:
    """Ray's own default, two requests for each replica, is far from what an engine can do."""
    sequences = engine.step_limits("cpu" if engine.device == "cpu" else "cuda").sequences
    return {"target_ongoing_requests": max(1, sequences // 2), **given}
