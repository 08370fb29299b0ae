"""Tiny models that pool, of every architecture, as transformers and sentence-transformers write
them; and a tokenizer with a few words for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

WORDS = ["the", "a", "dog", "cat", "sat", "ran", "on", "mat", "yes", "no", "red", "old", "sun"]
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
ENCODER = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
DISTILBERT = {
    "vocab_size": 40,
    "dim": 24,
    "hidden_dim": 56,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
DECODER = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", ENCODER),
    "Roberta": ("RobertaConfig", {**ENCODER, "type_vocab_size": 1}),
    "XLMRoberta": ("XLMRobertaConfig", {**ENCODER, "type_vocab_size": 1}),
    "DistilBert": ("DistilBertConfig", DISTILBERT),
    "Qwen3": ("Qwen3Config", DECODER),
    "Llama": ("LlamaConfig", {**DECODER, "head_dim": 8, "num_attention_heads": 3}),
    "GptOss": ("GptOssConfig", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
SHAPES["GptOss"][1]["sliding_window"] = 7
SHAPES["Llama"][1]["num_key_value_heads"] = 3
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert")


def write_model(folder: Path, architecture: str, **more: Any) -> Any:
    """Random weights of a tiny model such as `BertModel`; returns the model, to ask it."""
    import transformers

    family = next(name for name in SHAPES if architecture.startswith(name))
    config_name, shape = SHAPES[family]
    config = getattr(transformers, config_name)(**{**shape, **more})
    torch.manual_seed(7)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are otherwise 0 and 1
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    write_tokenizer(folder, tells_apart=family == "Bert")
    return model


def write_tiny_encoder(folder: Path, architecture: str, **more: Any) -> Path:
    """A folder without weights, for `load_format="dummy"`; it needs no transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**ENCODER, "architectures": [architecture], **more}
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_tokenizer(folder: Path, tells_apart: bool) -> None:
    """`tells_apart`: it gives types, too."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=48,
        model_input_names=["input_ids", "attention_mask", *["token_type_ids"] * tells_apart],
    ).save_pretrained(folder)


def make_tokenizer() -> Tokenizer:
    """One token a word, `[CLS]` and `[SEP]` around a text."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    return backend
