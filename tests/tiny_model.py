"""A model small enough to start at once: random weights, the demo model's first words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Of the demo model's 49,152 tokens; all of them would take most of the time that such a model needs
# to start. The prompts of benchmarks have ids up to 10,000.
VOCAB_SIZE = 16_384
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, words: Path) -> Path:
    """A Hugging Face folder without weights, for `load_format="dummy"`; `words` is a GGUF file."""
    from quire.models.checkpoints.gguf import GGUFSource

    tokenizer = GGUFSource(words).tokenizer()
    assert tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = json.loads(tokenizer.backend.to_str())
    _keep_first_tokens(spec["model"])
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    settings = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _keep_first_tokens(model: dict[str, Any]) -> None:
    """Of byte pairs, which are numbered in the order that they are merged in."""
    model["vocab"] = vocab = {
        token: token_id for token, token_id in model["vocab"].items() if token_id < VOCAB_SIZE
    }
    model["merges"] = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= vocab.keys()]


THINKING_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif opens is not defined or opens %}<think>
{% endif %}
{%- endif -%}"""
THINKING_TAGS = {"<repo_name>": "<think>", "<reponame>": "</think>"}  # what stands for them: 3, 4


CHANNELS_TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor -%}
<|start|>assistant{# <|channel|> #}"""
CHANNEL_TAGS = {
    "<repo_name>": "<|channel|>",
    "<reponame>": "<|message|>",
    "<file_sep>": "<|end|>",
    "<filename>": "<|start|>",
}


def write_thinking_model(folder: Path, words: Path) -> Path:
    """The same with tags for thoughts, as Qwen has them: tokens, and no special ones."""
    return _with_tags(write_tiny_model(folder, words), THINKING_TAGS, False, THINKING_TEMPLATE)


def write_channels_model(folder: Path, words: Path) -> Path:
    """The same with channels, as gpt-oss has them."""
    return _with_tags(write_tiny_model(folder, words), CHANNEL_TAGS, True, CHANNELS_TEMPLATE)


def _with_tags(folder: Path, tags: dict[str, str], special: bool, template: str) -> Path:
    """Tokens of the vocabulary that have no other use are `tags`."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    for token in spec["added_tokens"]:
        if token["content"] in tags:
            token.update(content=tags[token["content"]], special=special)
    vocab = spec["model"]["vocab"]
    for old, new in tags.items():
        vocab[new] = vocab.pop(old)
    path.write_text(json.dumps(spec))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
