"""What is computed: one file for each family, and where configs, weights and words come from."""
