"""Benchmarks of the cache: tiers, policies, the index."""
