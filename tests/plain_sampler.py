"""Sampling in the order that SPEC gives, one row at a time, in plain Python's numbers."""

from __future__ import annotations

import math

import numpy as np

from quire.params import SamplingParams
from quire.runner.sampling.sample_row import SampleRow

INF = math.inf


def reference_logits(logits: list[float], row: SampleRow) -> list[float]:
    params, logits = row.params, list(logits)
    prompt = [] if row.prompt_ids is None else row.prompt_ids.tolist()
    output = [] if row.output_ids is None else row.output_ids.tolist()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt + output):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= params.presence_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
    for token in row.banned:
        logits[token] = -INF
    return logits


def reference_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Filters one after the other, each on what the last one left; ties at an edge stay."""
    peak = max(logits)
    if params.is_greedy:
        best = logits.index(peak)
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((logit - peak) / params.temperature) for logit in logits]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if 0 < params.top_k < len(weights):
        least = sorted(weights, reverse=True)[params.top_k - 1]
        head = sorted(weights, reverse=True)[: params.top_k]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    else:
        head = sorted(weights, reverse=True)
    if params.top_p < 1:
        reached, total = 0.0, sum(head)
        for weight in head:
            least, reached = weight, reached + weight
            if reached >= params.top_p * total:
                break
        weights = [weight if weight >= least else 0.0 for weight in weights]
    total = sum(weights)
    return [weight / total for weight in weights]


def on_edge(logits: list[float], params: SamplingParams, slack: float = 1e-5) -> bool:
    """Whether rounding decides what is kept, so that two right answers may differ."""
    scaled = (np.array(logits) - max(logits)) / max(params.temperature, 1e-6)
    weights = -np.sort(-np.exp(scaled))
    weights = weights[weights > 0]
    gaps = weights[:-1] - weights[1:]
    if ((gaps > 0) & (gaps < slack * weights[:-1])).any():
        return True
    if (np.abs(weights - params.min_p) < slack * weights).any():
        return True
    head = weights[weights >= params.min_p]
    head = head[: params.top_k] if params.top_k > 0 else head
    sums = np.cumsum(head)
    return params.top_p < 1 and bool(
        (np.abs(sums - params.top_p * sums[-1]) < slack * sums[-1]).any()
    )
