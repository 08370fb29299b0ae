"""Workloads that anyone can run, and what they measured."""
