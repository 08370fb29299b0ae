"""Matrices in fewer bits: what lies in memory for each format, and its plain reference."""
