"""Products of matrices whose weights are codes of eight bits with scales."""
