"""Calls of tools: how models write them, how they are read, and how they are made to write them."""
