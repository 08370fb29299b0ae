"""Thoughts: how models mark them, how they are told from words and calls, and what may follow."""
