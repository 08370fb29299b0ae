"""Beam search with nothing shared and nothing clever: every beam a list, every token looked at."""

from __future__ import annotations

import math


def plain_beams(prompt, params, logprobs_behind, room=math.inf, eos=(0,)):
    """(token ids, score) of the beams, best first; `logprobs_behind(context)` is the model."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    most = min(params.max_tokens, room - len(prompt))
    width, power = params.beam_width, params.length_penalty
    running, ended = [(0.0, [])], []
    for length in range(1, most + 1):
        grown = [
            (total + float(logprob), [*tokens, token_id])
            for total, tokens in running
            for token_id, logprob in enumerate(logprobs_behind([*prompt, *tokens]))
            if token_id not in stops or length > params.min_tokens
        ]
        grown.sort(key=lambda beam: -beam[0])
        is_over = [tokens[-1] in stops or length == most for _, tokens in grown]
        best = zip(grown[:width], is_over, strict=False)
        ended += [(tokens, total / length**power) for (total, tokens), over in best if over]
        ended = sorted(ended, key=lambda beam: -beam[1])[:width]
        going = zip(grown, is_over, strict=True)
        running = [beam for beam, over in going if not over][:width]
        if not running or (len(ended) == width and params.early_stopping is True):
            break
        reach = most if params.early_stopping == "never" and power > 0 else length
        if len(ended) == width and running[0][0] / reach**power <= ended[-1][1]:
            break
    return ended
