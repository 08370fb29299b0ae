"""Benchmarks of a whole engine, the workloads they run, and the engines they are compared with."""
