"""The arithmetic of a step: paged KV read and written, each fast version beside its reference."""
