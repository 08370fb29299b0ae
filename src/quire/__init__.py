"""Quire: an LLM inference engine whose KV cache is paged, shared and tiered.

What needs torch is imported when it is first asked for, so that `import quire` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, ModelError, QuireError, RequestError

if TYPE_CHECKING:
    from quire.api.async_llm.llm import AsyncLLM
    from quire.api.llm import LLM
    from quire.beam_params import BeamSearchParams
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.lora_request import LoRARequest
    from quire.params import SamplingParams
    from quire.pooling_params import PoolingParams
    from quire.structured import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "LoRARequest",
    "ModelError",
    "PoolingParams",
    "QuireError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_LAZY = {
    "LLM": "quire.api.llm",
    "AsyncLLM": "quire.api.async_llm.llm",
    "BeamSearchParams": "quire.beam_params",
    "CompletionOutput": "quire.engine.outputs",
    "LoRARequest": "quire.lora_request",
    "PoolingParams": "quire.pooling_params",
    "RequestOutput": "quire.engine.outputs",
    "SamplingParams": "quire.params",
    "StructuredOutput": "quire.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from quire.gc_control import no_collections

    with no_collections():
        return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
