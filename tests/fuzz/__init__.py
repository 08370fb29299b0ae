"""Fuzzers: each is a module here with `run(seed, count)`, which raises when something is wrong.

`FULL` of a module is how many cases `make soak` wants of it and `SMALL` how many every test run
does; the same seed and count are always the same cases. `PYTHONPATH=tests python -m fuzz NAME`.
"""
