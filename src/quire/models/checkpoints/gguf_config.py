"""A GGUF file's metadata as a `ModelConfig`: put in the words of a config.json, read as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.checks import shown
from quire.errors import ModelError
from quire.models.checkpoints.gguf_architecture import WINDOW, GGUFArchitecture
from quire.models.checkpoints.gguf_file import GGUFFile
from quire.models.checkpoints.json_fields import LARGEST, SMALLEST
from quire.models.config import ModelConfig
from quire.models.hf_config import read_hf_config
from quire.models.registry import GGUF_FAMILIES

# Tensors in the file, parts of the config here.
ROPE_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_DIVISORS, LONG_FACTORS, SHORT_FACTORS)
ROPE_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
ENDS = ("eos", "eot", "eom")  # of text, turn and message


def architecture_of(file: GGUFFile) -> GGUFArchitecture:
    return _family(file)[1]


def _family(file: GGUFFile) -> tuple[str, GGUFArchitecture]:
    """The name of its architecture in a config.json, and its names in GGUF."""
    name = file.metadata.get("general.architecture")
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    if isinstance(name, str) and (name, has_experts) in GGUF_FAMILIES:
        return GGUF_FAMILIES[name, has_experts]
    if isinstance(name, str) and (name, True) in GGUF_FAMILIES:
        raise ModelError(
            f"{file.path} does not say how many experts it has ({name}.expert_count), as models of "
            f"the architecture {name} do: convert the model anew."
        )
    kind = "mixture of experts" if has_experts else "model"
    known = ", ".join(known for known, experts in GGUF_FAMILIES if experts == has_experts)
    raise ModelError(
        f"{file.path} is a {kind} of architecture {shown(name)} and Quire knows"
        f" {known} in GGUF; choose a model of these."
    )


def read_config(file: GGUFFile) -> ModelConfig:
    fields = _Fields(file)
    fields.refuse_unsupported()
    raw = _as_config_json(fields)
    config = read_hf_config({**raw, **fields.names.implied(raw)})
    # What follows is told by the tensors, or by the file's own keys, better than by the family.
    if ROPE_DIVISORS in file.tensors:
        divisors = _divisors(file, ROPE_DIVISORS, config.head_dim // 2)
        config = replace(config, rope=replace(config.rope, divisors=divisors))
    if WINDOW in fields.names.settings:
        return config
    return replace(config, windows=(fields.window(),) * config.num_layers)


def _as_config_json(fields: _Fields) -> dict[str, Any]:
    metadata, tensors = fields.file.metadata, fields.file.tensors
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", fields.whole("embedding_length") // heads)
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ENDS]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        ends += [tokens.index(end) for end in fields.names.end_tokens if end in tokens]
    settings = {ours: fields.get(key) for key, ours in fields.names.settings.items()}
    return {
        **{ours: value for ours, value in settings.items() if value is not None},
        "architectures": [fields.family],
        "vocab_size": fields.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": fields.whole("embedding_length"),
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.whole("context_length"),
        "partial_rotary_factor": fields.whole("rope.dimension_count", head_dim) / head_dim,
        "rope_theta": fields.get("rope.freq_base"),
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "eos_token_id": [end for end in ends if end is not None],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }


class _Fields:
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.family, self.names = _family(file)
        self.architecture = self.names.name

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number; one for each layer will do if they are all the same."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{self.file.path} has {self.architecture}.{key}={shown(value)} where Quire needs"
                " one positive whole number; choose another file."
            )
        return value

    def window(self) -> int | None:
        """0 says, as nothing does, that there is none."""
        return self.whole(WINDOW) if self.get(WINDOW) not in (None, 0) else None

    def refuse_unsupported(self) -> None:
        """What would load and compute, and be wrong."""
        path = self.file.path
        if self.file.metadata.get("split.count") not in (None, 0, 1):
            raise ModelError(
                f"{path} is one of several parts; join them with `llama-gguf-split --merge`."
            )
        for key in ("rope.dimension_sections", "nextn_predict_layers"):
            if self.get(key):
                raise ModelError(f"{path} has {key}, which Quire does not compute: choose another.")
        last = f"blk.{self.whole('block_count') - 1}.attn_output.weight"
        for needed in ("token_embd.weight", last):
            if needed not in self.file.tensors:
                raise ModelError(f"{path} has no tensor {needed}; choose a file of all weights.")
        if self.names.has_latents:
            return
        if self.get("attention.value_length") not in (None, self.get("attention.key_length")):
            raise ModelError(f"{path} has keys and values of two sizes; Quire needs one size.")


def _rope_scaling(fields: _Fields) -> dict[str, Any]:
    file, kind = fields.file, fields.get("rope.scaling.type")
    given = {name: fields.get(f"rope.scaling.{key}") for key, name in ROPE_SCALING.items()}
    if LONG_FACTORS in file.tensors:
        pairs = file.tensors[LONG_FACTORS].shape[0]
        given["long_factor"] = list(_divisors(file, LONG_FACTORS, pairs))
        given["short_factor"] = list(_divisors(file, SHORT_FACTORS, pairs))
        given["attention_factor"] = fields.get("rope.scaling.attn_factor")
        kind = "longrope"
    if kind in (None, "none"):
        return {}
    return {"rope_type": kind, **{name: v for name, v in given.items() if v is not None}}


def _divisors(file: GGUFFile, name: str, pairs: int) -> tuple[float, ...]:
    """Llama 3's scaled positions come as one divisor for each rotated pair, longrope's as two."""
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {name}; convert the model anew.")
    stored = file.tensor(name)
    if stored.shape != (pairs,):
        raise ModelError(
            f"{file.path} has rotary divisors of the shape {list(stored.shape)} for"
            f" {pairs} rotated pairs; convert the model anew."
        )
    divisors = tuple(stored[()].float().tolist())
    if not all(SMALLEST < divisor < LARGEST for divisor in divisors):
        raise ModelError(f"{file.path} has rotary divisors of 0 or no numbers; convert it anew.")
    return divisors
