"""Attention over paged KV in Triton: decodes, prompts, and what both load."""
