"""What blocks of vLLM are named after: the bytes of model and adapters, and the arithmetic."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.connectors.vllm.orders import Prompt
from quire.errors import ConfigError
from quire.kv import Namespace
from quire.models.checkpoints.digest import Fingerprint

log = logging.getLogger("quire")

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGS = ("config.json", "params.json", "adapter_config.json", "hf_quant_config.json")
ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")


def folder_digest(folder: Path, kind: str) -> str:
    """Quire's digest of all bytes of a folder's weights and configuration."""
    files = sorted(
        path for path in folder.iterdir() if path.suffix in WEIGHTS or path.name in CONFIGS
    )
    return Fingerprint(kind, files).result()


def model_digest(model: str, revision: str | None, model_name: str) -> str:
    """That of the model's folder; of a model without, what the user says."""
    if model_name:
        return f"named {model_name}"
    folder = model_folder(model, revision)
    if folder is None or not any(path.suffix in WEIGHTS for path in folder.iterdir()):
        raise ConfigError(
            f"{model} is no folder with weights, so these cannot be told from others; give "
            "model_name in kv_connector_extra_config, and another one whenever the weights change."
        )
    return folder_digest(folder, "vllm model")


def model_folder(model: str, revision: str | None) -> Path | None:
    """Where a model lies: in its folder, or in the cache of the Hugging Face hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def namespace_of(
    model: str, version: str, config: Any, layout: str, kv_dtype: str, worker: str
) -> Namespace:
    """`config` is vLLM's own; `worker` says which part of the model it has."""
    model_config, cache_config = config.model_config, config.cache_config
    quantization = model_config.quantization or "none"
    hf_config = model_config.hf_text_config
    rope = {name: getattr(hf_config, name, None) for name in ROPE_FIELDS}
    return Namespace(
        model=model,
        dtype=f"{model_config.dtype} in vLLM {version}, quantization {quantization}",
        kv_dtype=f"{kv_dtype}, {cache_config.cache_dtype}",
        block_size=cache_config.block_size,
        layout=f"{layout}; {worker}",
        rope=f"{rope} {model_config.hf_overrides or ''}".strip(),
    )


class Prompts:
    """Names what requests' blocks depend on besides tokens and model."""

    def __init__(self) -> None:
        # By path and number: vLLM gives a folder that is loaded again another number.
        self._adapters: dict[tuple[str, int], str | None] = {}

    def of(self, request: Any) -> Prompt | None:
        """None where that cannot be told: such requests are not cached."""
        if getattr(request, "prompt_embeds", None) is not None:
            return None
        adapter = "" if request.lora_request is None else self._adapter(request.lora_request)
        if adapter is None:
            return None
        images = [feature.identifier for feature in request.mm_features or ()]
        if images:  # their tokens say nothing of them
            adapter = json.dumps([adapter, *images])
        return Prompt(request.cache_salt or "", adapter)

    def _adapter(self, lora: Any) -> str | None:
        loaded = lora.lora_path, lora.lora_int_id
        if loaded not in self._adapters or lora.load_inplace:
            folder = Path(lora.lora_path)
            if folder.is_dir():
                self._adapters[loaded] = folder_digest(folder, "vllm adapter")
            else:
                log.warning("Requests with %s are not cached: it is no folder.", folder)
                self._adapters[loaded] = None
        return self._adapters[loaded]


def worker_name(parallel: Any, rank: int) -> str:
    """Which part of a model a worker has."""
    sizes: Mapping[str, int] = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
    }
    return f"worker {rank} of {' '.join(f'{name} {size}' for name, size in sizes.items())}"
