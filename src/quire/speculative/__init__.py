"""Speculative decoding: drafters, and how many drafts pay."""
