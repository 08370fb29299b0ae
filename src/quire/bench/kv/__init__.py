"""Benchmarks of the KV cache: tiers, eviction policies, the prefix index."""
