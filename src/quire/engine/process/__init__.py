"""The engine in a process of its own, and those who talk to it: plain data over one socket."""
