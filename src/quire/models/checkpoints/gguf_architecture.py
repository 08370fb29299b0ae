"""What converters to GGUF call the parts of a model, and a family's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# A layer's number, and within an expert also that one's: `…layers.3.mlp.experts.7.up_proj`.
OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*?)(?:(?<=\.experts)\.\d+(\..*))?")
WINDOW = "attention.sliding_window"
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """A family in GGUF: `general.architecture`, and what is not as in Llama's files."""

    name: str
    has_experts: bool = False
    has_latents: bool = False  # keys and values are of two sizes
    pairs_side_by_side: bool = False  # converters change the order of q's and k's rows
    # Names within a layer; with their endings, where those are other ones.
    blocks: Mapping[str, str] = field(default_factory=dict)
    # Keys, as config.json calls them; with `WINDOW` the family says which layers have the window.
    settings: Mapping[str, str] = field(default_factory=dict)
    # What config.json says and a file does not, from what the file says.
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: {}
    end_tokens: tuple[str, ...] = ()  # that end a turn, which files may not say of them
    unit_offset: bool = False  # norms are stored as they multiply, not as their distance from 1

    def hugging_face_name(self, name: str) -> str:
        """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
        stem, _, kind = name.rpartition(".")
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{kind}"
        block, _, part = stem.removeprefix("blk.").partition(".")
        if not stem.startswith("blk."):
            return name
        if f"{part}.{kind}" in self.blocks:
            return f"model.layers.{block}.{self.blocks[f'{part}.{kind}']}"
        # Until April 2024 converters kept experts apart: `blk.3.ffn_up.7.weight` is one's.
        matrix, _, expert = part.partition(".")
        of_all = self.blocks.get(f"{matrix}_exps", "")
        if of_all and expert.isdecimal():
            experts, _, ours = of_all.rpartition(".")
            return f"model.layers.{block}.{experts}.{expert}.{ours}.{kind}"
        found = self.blocks.get(part) or BLOCK_NAMES.get(part)
        return f"model.layers.{block}.{found}.{kind}" if found else name

    def gguf_name(self, name: str) -> str:
        """The inverse, as converters write it today; unknown names stay."""
        stem, _, kind = name.rpartition(".")
        for theirs, ours in TOP_NAMES.items():
            if stem == ours:
                return f"{theirs}.{kind}"
        found = OF_LAYER.fullmatch(stem)
        if found is None:
            return name
        block, before, after = found.groups()
        part = f"{before}{after or ''}"
        unchanged = {key: ours for key, ours in BLOCK_NAMES.items() if key not in self.blocks}
        for theirs, ours in {**self.blocks, **unchanged}.items():
            if ours == f"{part}.{kind}":
                return f"blk.{block}.{theirs}"
            if ours == part:
                return f"blk.{block}.{theirs}.{kind}"
        return name
