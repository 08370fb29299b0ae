"""Products with packed matrices on Hopper GPUs, whatever the format: see `many.py`."""
