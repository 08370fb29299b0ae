"""Several engines as one: who gets which request, and what happens when one of them dies."""
