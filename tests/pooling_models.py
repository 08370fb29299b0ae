"""Tiny models that pool, of every architecture, as transformers and sentence-transformers write
them; and a tokenizer with a few words for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

WORDS = "the a dog cat sat ran on mat yes no red blue old new sun moon tree far".split()
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
ENCODER = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DISTILBERT = {
    "vocab_size": 40,
    "dim": 24,
    "hidden_dim": 56,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "pad_token_id": 0,
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
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", ENCODER),
    "Roberta": ("RobertaConfig", {**ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
    "XLMRoberta": ("XLMRobertaConfig", {**ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
    "DistilBert": ("DistilBertConfig", DISTILBERT),
    "Qwen3": ("Qwen3Config", DECODER),
    "Llama": ("LlamaConfig", {**DECODER, "head_dim": 8, "num_attention_heads": 3}),
}
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
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """One token a word, `[CLS]` and `[SEP]` around a text, as BERT has them."""
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=48,
    ).save_pretrained(folder)
