"""One file for each group of addresses; each has a `router`."""
