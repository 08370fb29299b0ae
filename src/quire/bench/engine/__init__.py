"""Benchmarks of a whole engine, and the workloads they run."""
