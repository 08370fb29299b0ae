"""Minutes of mixed random load over real tiers that fail: right answers, and nothing left behind.

`make soak SECONDS=60`, or `PYTHONPATH=tests python -m soak --seconds 60`.
"""
