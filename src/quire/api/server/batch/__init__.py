"""Batches: files of requests, answered behind all other requests, each line once."""
