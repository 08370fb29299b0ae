"""Several engines as one: which gets a request, and what happens when one of them dies."""
