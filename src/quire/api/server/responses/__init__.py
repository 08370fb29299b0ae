"""The Responses API: items in, items and events out, and the responses that are kept."""
