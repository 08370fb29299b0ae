"""From logits to tokens: penalties, filters, noise, logprobs."""
