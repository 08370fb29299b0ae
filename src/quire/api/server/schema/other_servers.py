"""Fields of other servers' APIs that Quire has not: which are refused, and which do no harm.

A field that would change what is generated is refused, with what to use instead: an answer that
ignores it would look right and not be. A value that asks for nothing, such as `mirostat: 0`, may be
sent. What is harmless is ignored and logged, like fields that no server knows. Other servers' ways
to ask for a form of output are understood: `quire.api.server.answers.response_format` has those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    of: str  # whose field it is
    does: str  # what it would change
    neutral: tuple[Any, ...] = ()  # values that ask for nothing; None always does
    instead: str = "leave it out"


LLAMA_CPP, SGLANG, VLLM, TGI = "llama.cpp", "SGLang", "vLLM", "TGI"
TABBY, HF, OLLAMA = "TabbyAPI", "transformers", "Ollama"

# Structured output that is asked for in a way that Quire does not understand.
_STRUCTURED = {
    "guided_whitespace_pattern": Refused(
        VLLM, "the white space in JSON", (), "use x-guidance in the schema"
    ),
    "structural_tag": Refused(
        SGLANG, "the form of parts of the text", (), "use structured with a grammar"
    ),
    "grammar_lazy": Refused(LLAMA_CPP, "where the form begins", (False,)),
    "grammar_triggers": Refused(LLAMA_CPP, "where the form begins", ([],)),
    "grammar_string": Refused(TABBY, "the form of the text", ("",), "use grammar"),
    "regex_pattern": Refused(TABBY, "the form of the text", ("",), "use regex"),
    "json_mode": Refused(TGI, "the form of the text", (False,), "use response_format"),
    "format": Refused(OLLAMA, "the form of the text", ("",), "use response_format"),
    "response_schema": Refused("Gemini", "the form of the text", (), "use response_format"),
    "response_mime_type": Refused(
        "Gemini", "the form of the text", ("text/plain",), "use response_format"
    ),
    "output_format": Refused("Anthropic", "the form of the text", (), "use response_format"),
}

# What tokens may be drawn, and how.
_SAMPLING = {
    "allowed_token_ids": Refused(VLLM, "which tokens may be drawn", ([],)),
    "bad_words": Refused(VLLM, "which words may be written", ([],)),
    "banned_strings": Refused(TABBY, "which words may be written", ([], "")),
    "banned_tokens": Refused(TABBY, "which tokens may be drawn", ([], ""), "use logit_bias"),
    "custom_token_bans": Refused(TABBY, "which tokens may be drawn", ([], ""), "use logit_bias"),
    "logits_processors": Refused(VLLM, "which tokens may be drawn", ([],)),
    "custom_logit_processor": Refused(SGLANG, "which tokens may be drawn", ("",)),
    "custom_params": Refused(SGLANG, "what its logit processor does", ({},)),
    "vllm_xargs": Refused(VLLM, "what its extensions do", ({},)),
    "no_repeat_ngram_size": Refused(HF, "which tokens may be drawn", (0,)),
    "do_sample": Refused(HF, "whether tokens are drawn", (True,), "use temperature"),
    "num_beams": Refused(HF, "the search", (1,), "use use_beam_search and n"),
    "num_return_sequences": Refused(HF, "how many answers come", (1,), "use n"),
    "samplers": Refused(LLAMA_CPP, "the order of sampling", ([],)),
    "mirostat": Refused(LLAMA_CPP, "sampling", (0,)),
    "mirostat_mode": Refused(TABBY, "sampling", (0,)),
    "dry_multiplier": Refused(LLAMA_CPP, "a penalty", (0,), "use repetition_penalty"),
    "xtc_probability": Refused(LLAMA_CPP, "sampling", (0,)),
    "dynatemp_range": Refused(LLAMA_CPP, "the temperature", (0,), "use temperature"),
    "min_temp": Refused(TABBY, "the temperature", (), "use temperature"),
    "max_temp": Refused(TABBY, "the temperature", (), "use temperature"),
    "temperature_last": Refused(TABBY, "the order of sampling", (False,)),
    "smoothing_factor": Refused(TABBY, "sampling", (0,)),
    "skew": Refused(TABBY, "sampling", (0,)),
    "typical_p": Refused(LLAMA_CPP, "sampling", (1,), "use top_p or min_p"),
    "typical": Refused(TABBY, "sampling", (1,), "use top_p or min_p"),
    "tfs_z": Refused(LLAMA_CPP, "sampling", (1,), "use top_p or min_p"),
    "tfs": Refused(TABBY, "sampling", (1,), "use top_p or min_p"),
    "top_a": Refused(TABBY, "sampling", (0,), "use min_p"),
    "top_n_sigma": Refused(LLAMA_CPP, "sampling", (0, -1), "use min_p"),
    "nsigma": Refused(TABBY, "sampling", (0, -1), "use min_p"),
    "epsilon_cutoff": Refused(HF, "sampling", (0,), "use min_p"),
    "eta_cutoff": Refused(HF, "sampling", (0,), "use min_p"),
    "min_keep": Refused(LLAMA_CPP, "how many tokens filters leave", (0, 1)),
    "repeat_penalty": Refused(LLAMA_CPP, "a penalty", (1,), "use repetition_penalty"),
    "penalize_nl": Refused(LLAMA_CPP, "a penalty", (False,)),
    "repetition_detection": Refused(VLLM, "where the text ends", ()),
    "watermark": Refused(TGI, "which tokens may be drawn", (False,)),
    "negative_prompt": Refused(TABBY, "the distribution", ("",)),
    "guidance_scale": Refused(HF, "the distribution", (1,)),
    "cfg_scale": Refused(TABBY, "the distribution", (1,)),
}

# How long a text is, and where it ends.
_LENGTH = {
    "max_new_tokens": Refused(HF, "the length", (), "use max_tokens"),
    "max_length": Refused(HF, "the length", (), "use max_tokens"),
    "n_predict": Refused(LLAMA_CPP, "the length", (-1,), "use max_tokens"),
    "num_predict": Refused(OLLAMA, "the length", (-1,), "use max_tokens"),
    "min_new_tokens": Refused(SGLANG, "the length", (0,), "use min_tokens"),
    "n_indent": Refused(LLAMA_CPP, "where the text ends", (0,), "use stop"),
    "t_max_predict_ms": Refused(LLAMA_CPP, "where the text ends", (0,), "use max_tokens"),
    "stop_regex": Refused(SGLANG, "where the text ends", ([], ""), "use stop"),
    "stop_sequences": Refused(TGI, "where the text ends", ([],), "use stop"),
    "no_stop_trim": Refused(
        SGLANG, "what is shown of a stop", (False,), "use include_stop_str_in_output"
    ),
    "max_thinking_tokens": Refused(
        SGLANG, "how long the model thinks", (), "use a chat with thinking_token_budget"
    ),
}

# What the model reads, which model it is, and whose cache it has.
_INPUT = {
    "documents": Refused(VLLM, "the prompt", ([],), "use chat_template_kwargs"),
    "truncate": Refused(TGI, "the prompt", (), "cut it yourself"),
    "prompt_embeds": Refused(VLLM, "the prompt", ()),
    "input_embeds": Refused(SGLANG, "the prompt", ()),
    "image_data": Refused(LLAMA_CPP, "the prompt", ([],)),
    "lora": Refused(LLAMA_CPP, "the model", ([],)),
    "lora_path": Refused(SGLANG, "the model", ("",)),
    "lora_request": Refused(VLLM, "the model", ()),
    "adapter_id": Refused(TGI, "the model", ("",)),
    "session_params": Refused(SGLANG, "the prompt", ({},)),
    "kv_transfer_params": Refused(VLLM, "where the prompt's KV is", ({},)),
    "extra_key": Refused(SGLANG, "who shares the cache", ("",), "use cache_salt"),
}

# What comes back, and fields that have others inside.
_SHAPE = {
    "n_probs": Refused(LLAMA_CPP, "what is returned", (0,), "use logprobs"),
    "return_logprob": Refused(SGLANG, "what is returned", (False,), "use logprobs"),
    "top_n_tokens": Refused(TGI, "what is returned", (0,), "use logprobs"),
    "post_sampling_probs": Refused(LLAMA_CPP, "what logprobs are", (False,)),
    "return_hidden_states": Refused(SGLANG, "what is returned", (False,)),
    "return_full_text": Refused(TGI, "what is returned", (False,), "use echo"),
    "return_tokens_as_token_ids": Refused(
        VLLM, "what logprobs name", (False,), "use return_token_ids"
    ),
    "spaces_between_special_tokens": Refused(VLLM, "the text", (True,)),
    "parse_tool_calls": Refused(LLAMA_CPP, "what is a call", (True,)),
    "extra_body": Refused(
        "OpenAI's client", "all that it has inside", ({},), "put its fields into the request"
    ),
    "sampling_params": Refused(
        SGLANG, "all that it has inside", ({},), "put its fields into the request"
    ),
    "parameters": Refused(TGI, "all that it has inside", ({},), "put its fields into the request"),
    "options": Refused(OLLAMA, "all that it has inside", ({},), "put its fields into the request"),
}

REFUSED: Mapping[str, Refused] = {**_STRUCTURED, **_SAMPLING, **_LENGTH, **_INPUT, **_SHAPE}

# By name, why ignoring it changes no answer.
_SWITCH = "it matters only with a field that is refused"
HARMLESS: Mapping[str, str] = {
    "guided_decoding_backend": "which library holds the text to its form",
    "cache_prompt": "prompts are always cached",
    "id_slot": "there are no slots",
    "slot_id": "there are no slots",
    "n_keep": "a prompt that does not fit is refused, never shifted",
    "n_discard": "a prompt that does not fit is refused, never shifted",
    "mirostat_tau": _SWITCH,
    "mirostat_eta": _SWITCH,
    "dry_base": _SWITCH,
    "dry_allowed_length": _SWITCH,
    "dry_penalty_last_n": _SWITCH,
    "dry_sequence_breakers": _SWITCH,
    "xtc_threshold": _SWITCH,
    "dynatemp_exponent": _SWITCH,
    "repeat_last_n": _SWITCH,
    "timings_per_token": "it is about what is measured",
    "stream_reasoning": "thoughts come as they are written, like words",
    "reasoning_format": "include_reasoning and separate_reasoning say where thoughts are",
    "rid": "a name for the request",
    "request_id": "a name for the request",
    "keep_alive": "the model stays loaded",
    "decoder_input_details": "it is about what is shown of the prompt",
    "details": "it is about what is shown of the answer",
    "top_logprobs_num": "it matters only with return_logprob",
    "mm_processor_kwargs": "there are no images",
    "media_io_kwargs": "there are no images",
}


def refusal(name: str, value: Any) -> str | None:
    """Why a field with this value is refused; None if it may be sent."""
    found = REFUSED.get(name)
    if found is None or value is None or value in found.neutral:
        return None
    return (
        f"{name} is not supported by this server; {found.instead}. "
        f"({found.of} has it; it would change {found.does}.)"
    )
