"""Products with matrices of GGUF's types, in tiles (`kernels/gguf_tiles.py`)."""
