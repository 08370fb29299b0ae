"""Guessing tokens ahead: who guesses, and how much guessing pays."""
