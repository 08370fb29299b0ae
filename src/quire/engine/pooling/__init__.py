"""The engine of models that answer with one vector: whole texts, step by step, and no cache."""
