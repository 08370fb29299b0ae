"""Completion for shells: what the command line takes, and a script of it for each shell."""
