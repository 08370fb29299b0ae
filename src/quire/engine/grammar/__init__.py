"""Structured output: which tokens a sequence may go on with, so that its text has a given form."""
