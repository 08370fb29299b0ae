"""Checkpoints whose matrices are quantised: what each method calls its tensors, read as one."""
