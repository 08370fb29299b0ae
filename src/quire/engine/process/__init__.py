"""The engine in a process of its own, and its clients: plain data over one socket."""
