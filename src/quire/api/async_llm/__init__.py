"""`AsyncLLM`: the engine in a process of its own, for code that runs in an event loop."""
