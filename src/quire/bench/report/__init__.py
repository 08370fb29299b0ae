"""How a benchmark measures and reports: samples, tables, profiles, the machine's limits."""
