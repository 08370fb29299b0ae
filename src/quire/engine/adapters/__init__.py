"""Adapters: by which names they are known, what host memory keeps of them, and which have slots."""
