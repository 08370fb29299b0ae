"""OpenAI's HTTP API over an engine in another process; torch is not imported here."""
