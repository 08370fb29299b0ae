"""Benchmarks of single kernels: attention over scattered blocks."""
