"""`QuireConnector`, as vLLM calls it: each of its objects is one half, and has that half do it."""

from __future__ import annotations

import logging
from typing import Any

import vllm
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from quire.connectors.vllm.cache_views import describe, layer_pool
from quire.connectors.vllm.lookup import LookupClient, LookupServer, socket_path
from quire.connectors.vllm.metrics import QuireMetrics, QuireStats
from quire.connectors.vllm.naming import Prompts, model_digest, namespace_of, worker_name
from quire.connectors.vllm.orders import Orders
from quire.connectors.vllm.scheduler_half import SchedulerHalf
from quire.connectors.vllm.settings import Settings
from quire.connectors.vllm.worker_half import WorkerHalf
from quire.errors import ConfigError
from quire.kv import open_store
from quire.kv.hit_rule import Window

log = logging.getLogger("quire")


class StepOrders(Orders, KVConnectorMetadata):
    """The orders, as vLLM carries them to the workers."""


class QuireConnector(KVConnectorBase_V1, SupportsHMA):
    """Quire's tiers below vLLM's blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._num_blocks = kv_cache_config.num_blocks
        self._groups = kv_cache_config.kv_cache_groups
        self._windows = [window_of(group.kv_cache_spec) for group in self._groups]
        self._settings = Settings.create(self._kv_transfer_config.kv_connector_extra_config or {})
        self._check()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._server: LookupServer | None = None
        self._orders = Orders()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                [LookupClient(self._socket(rank)) for rank in range(self._num_workers)],
                vllm_config.cache_config.block_size,
                Prompts().of,
                self._windows,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a miss later on

    @property
    def _num_workers(self) -> int:
        size: int = self._config.parallel_config.world_size
        return size

    def _socket(self, rank: int) -> Any:
        return socket_path(str(self._kv_transfer_config.engine_id), rank)

    def _check(self) -> None:
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "A block that a tier has lost is computed again; set "
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config.'
            )
        parallel = self._config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(f"Quire's connector does not know {name}; leave it at 1.")
        sizes = {group.kv_cache_spec.block_size for group in self._groups}
        if sizes != {self._config.cache_config.block_size}:
            raise ConfigError(
                f"KV groups with blocks of {sorted(sizes)} tokens cannot be kept; "
                "add --disable-hybrid-kv-cache-manager."
            )

    # --- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        config, rank = self._config, self._config.parallel_config.rank
        dims = block_dims(kv_caches, config)
        first = next(iter(kv_caches.values()))
        groups = [[name for name in group.layer_names if name in dims] for group in self._groups]
        namespace = namespace_of(
            model_digest(
                config.model_config.model, config.model_config.revision, self._settings.model_name
            ),
            vllm.__version__,
            config,
            f"{describe(kv_caches, dims, groups)}, windows {self._windows}",
            str(first.dtype),
            worker_name(config.parallel_config, rank),
        )
        pool = layer_pool(kv_caches, dims, self._num_blocks, groups)
        parallel = config.parallel_config
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        tiers = self._settings.tiers_of(
            replica * self._num_workers + rank, parallel.data_parallel_size * self._num_workers
        )
        self._worker = WorkerHalf(open_store(pool, namespace, windows=self._windows, **tiers))
        self._server = LookupServer(self._socket(rank), self._worker.answer)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None and isinstance(kv_connector_metadata, Orders)
        self._worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin_loads(self._step_orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are over before a request is scheduled

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return  # all layers are saved at once, behind the step

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.begin_saves(self._step_orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        sent, received = self._worker.results()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> QuireStats | None:
        counts = {} if self._worker is None else self._worker.take_counts()
        return QuireStats(data=counts) if counts else None

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._worker is not None:
            self._worker.close()
        self._server = self._worker = None

    def _step_orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    # --- scheduler --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        found = self._scheduler.num_found_tokens(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return StepOrders(**vars(self._scheduler.plan_step(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.received(sorted(connector_output.finished_recving or ()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.ended(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # --- metrics ----------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QuireStats:
        return QuireStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> QuireMetrics:
        return QuireMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def window_of(spec: Any) -> Window:
    """That of a KV group's layers."""
    if isinstance(spec, SlidingWindowSpec):
        window: int = spec.sliding_window
        return window
    if isinstance(spec, FullAttentionSpec):
        return None
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return window_of(next(iter(spec.kv_cache_specs.values())))
    raise ConfigError(
        f"Quire's connector keeps full attention and sliding windows, and no {type(spec).__name__}."
    )


def block_dims(kv_caches: dict[str, Tensor], config: Any) -> dict[str, int]:
    """Which dimension of each layer's tensor counts blocks, as vLLM says.

    In newer versions it is the first; before, each attention backend says which. Layers that share
    the KV of another are left out.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(kv_caches))
    dims = {}
    for name in kv_caches:
        layer: Any = layers[name]
        backend = layer.get_attn_backend()
        if not hasattr(backend, "get_kv_cache_shape"):
            dims[name] = 0
            continue
        spec = layer.get_kv_cache_spec(config)
        if spec is not None:
            dims[name] = backend.get_kv_cache_block_dim(
                spec.block_size, spec.num_kv_heads, spec.head_size, config.cache_config.cache_dtype
            )
    return dims
