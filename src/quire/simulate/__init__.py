"""The same decisions, with a clock in place of a device: what a fleet would do with a trace."""
