"""Products with four-bit matrices in tiles (`kernels/int4_tiles.py`), unpacked in registers."""
