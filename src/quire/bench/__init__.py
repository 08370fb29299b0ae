"""Benchmarks: `quire bench`, with the workloads that it runs and the reports that it prints."""
