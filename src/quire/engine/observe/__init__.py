"""What can be seen of an engine from outside, as plain data."""
