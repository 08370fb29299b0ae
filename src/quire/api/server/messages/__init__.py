"""Anthropic's Messages API: its conversations, tools, answers and errors."""
