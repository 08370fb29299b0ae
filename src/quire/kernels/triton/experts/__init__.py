"""Mixtures of experts: a choice for each token, pairs sorted by expert, and grouped products."""
