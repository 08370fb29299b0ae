"""A Mooncake store, behind a process of its own."""
