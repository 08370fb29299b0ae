"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from quire.api.server.errors import bad_request
from quire.api.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from quire.api.server.state import Caller, State
from quire.engine.limits import checked_ids

router = APIRouter()


@router.post("/tokenize")
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeRequest, state: State, caller: Caller) -> dict[str, Any]:
    """The token ids of a prompt, or of a conversation in the model's template."""
    state.served(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        tool_use = state.tool_use(body.tools, None, None)
        messages, variables = tool_use.conversation(body.messages, body.template_variables())
        prompt = await state.reader.read_chat(
            messages,
            body.add_generation_prompt,
            variables,
            continue_final=body.continue_final_message,
        )
        ids: list[int] = prompt.token_ids.tolist()
    else:
        special = body.add_special_tokens is not False
        ids = await state.reader.encode(body.prompt or "", special)
    return {
        "count": len(ids),
        "max_model_len": state.client.limits.max_model_len,
        "tokens": ids,
        "token_strs": [state.names.text(i) for i in ids] if body.return_token_strs else None,
    }


@router.get("/tokenizer_info")
@router.get("/v1/tokenizer_info", include_in_schema=False)
async def tokenizer_info(state: State, caller: Caller) -> dict[str, Any]:
    """The special tokens and the chat template, for clients that have no tokenizer themselves."""
    tokenizer = state.reader.tokenizer
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    texts = {role: tokenizer.special_tokens.get(role) for role in roles}
    return {**texts, "chat_template": tokenizer.chat_template}


@router.post("/detokenize")
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeRequest, state: State, caller: Caller) -> dict[str, Any]:
    """The text of some token ids."""
    state.served(body.model)
    limits = state.client.limits
    if not isinstance(body.tokens, list):
        raise bad_request("tokens must be a list of token ids.", param="tokens")
    if len(body.tokens) > limits.max_model_len:
        raise bad_request(
            f"{len(body.tokens):,} tokens came; send at most {limits.max_model_len:,}.",
            param="tokens",
        )
    ids = checked_ids(body.tokens, limits.vocab_size).tolist() if body.tokens else []
    return {"prompt": state.reader.tokenizer.decode(ids, body.skip_special_tokens)}
