"""The families Quire knows, by the architecture's name in a config.json."""

from __future__ import annotations

from quire.checks import shown
from quire.errors import ModelError
from quire.models.causal_lm import CausalLM
from quire.models.deepseek_v2 import DeepseekV2ForCausalLM
from quire.models.deepseek_v3 import DeepseekV3ForCausalLM
from quire.models.gemma2 import Gemma2ForCausalLM
from quire.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from quire.models.glm4 import Glm4ForCausalLM
from quire.models.gpt_oss import GptOssForCausalLM
from quire.models.granite import GraniteForCausalLM
from quire.models.llama import LlamaForCausalLM
from quire.models.mistral import MistralForCausalLM
from quire.models.mixtral import MixtralForCausalLM
from quire.models.olmo2 import Olmo2ForCausalLM
from quire.models.phi3 import Phi3ForCausalLM
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.qwen2_moe import Qwen2MoeForCausalLM
from quire.models.qwen3 import Qwen3ForCausalLM
from quire.models.qwen3_moe import Qwen3MoeForCausalLM
from quire.models.smollm3 import SmolLM3ForCausalLM

KNOWN: tuple[type[CausalLM], ...] = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Phi3ForCausalLM,
    Olmo2ForCausalLM,
    SmolLM3ForCausalLM,
    GraniteForCausalLM,
    Glm4ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    MixtralForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
    GptOssForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)
FAMILIES = {model.__name__: model for model in KNOWN}
# By the name of a file's architecture, and whether it has experts: one name may stand for two.
GGUF_FAMILIES = {
    (m.gguf.name, m.gguf.has_experts): (m.__name__, m.gguf) for m in KNOWN if m.gguf is not None
}


def family(architecture: str) -> type[CausalLM]:
    try:
        return FAMILIES[architecture]
    except KeyError:
        raise ModelError(
            f"Quire does not know the architecture {shown(architecture)}; it knows "
            f"{', '.join(FAMILIES)}."
        ) from None
