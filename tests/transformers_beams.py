"""Beam search by `transformers`: what Quire's is held to."""

from __future__ import annotations

import torch


def search(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """`generate` goes another way for a single beam; this one is for any width."""
    return model._beam_search(
        input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
    )


@torch.inference_mode()
def beams_of_transformers(model, prompt, params, eos=(0,), **options):
    """(token ids, score) of the beams, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),  # a zero in a prompt is no padding
        custom_generate=search,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=[*eos, *params.stop_token_ids],
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = zip(found.sequences[:, len(prompt) :].tolist(), found.beam_indices.tolist(), strict=True)
    # A beam that ended earlier is padded: there it came from no beam.
    tokens = [[t for t, beam in zip(*row, strict=True) if beam >= 0] for row in rows]
    return list(zip(tokens, found.sequences_scores.tolist(), strict=True))


def check_beams(output, expected, length_penalty):
    """The same tokens, and scores within 1e-4."""
    assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
    for beam, (tokens, score) in zip(output.outputs, expected, strict=True):
        assert abs(beam.score - score) < 1e-4 * max(1, abs(score))
        assert abs(beam.cumulative_logprob - score * len(tokens) ** length_penalty) < 1e-3
