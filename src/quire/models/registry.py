"""The families Quire knows, by the architecture's name in a config.json."""

from __future__ import annotations

from quire.checks import shown
from quire.errors import ModelError
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaForCausalLM
from quire.models.mistral import MistralForCausalLM
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.qwen3 import Qwen3ForCausalLM

FAMILIES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def family(architecture: str) -> type[CausalLM]:
    try:
        return FAMILIES[architecture]
    except KeyError:
        raise ModelError(
            f"Quire does not know the architecture {shown(architecture)}; it knows "
            f"{', '.join(FAMILIES)}."
        ) from None
