"""Adapters on a GPU: `a x` of all rows in one launch (shrink), and `b` of that added (expand)."""
