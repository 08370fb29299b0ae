"""How a step is computed: from a plan of plain data to sampled tokens."""
