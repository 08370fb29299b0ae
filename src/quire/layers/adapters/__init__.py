"""Adapters (LoRA) over the matrices of a model: slots that hold them, and what rows they change."""
